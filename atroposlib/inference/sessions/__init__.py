"""Conversations as token sequences: chat templates, sequences and managed servers."""

__all__ = [
    "chat_template",
    "managed_server",
    "messages",
    "proxy_client",
    "sequences",
    "text_sessions",
]
