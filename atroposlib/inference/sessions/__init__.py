"""Conversations as token sequences: chat templates, sequences and managed servers."""

__all__ = [
    "chat_template",
    "managed_server",
    "proxy_client",
    "sequences",
    "text_sessions",
]
