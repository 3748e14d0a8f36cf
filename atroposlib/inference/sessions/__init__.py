"""Conversations as token sequences: chat templates, sequences, and the managed servers that keep them."""

__all__ = ["chat_template", "managed_server", "proxy_client", "sequences"]
