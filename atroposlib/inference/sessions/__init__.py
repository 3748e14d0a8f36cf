"""Conversations as token sequences: chat templates, sequences, and the managed servers that keep them."""
