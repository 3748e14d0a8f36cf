"""Tokenizers with a chat template that suits training."""
