"""One class per kind of inference server, and what they share: the door (`admission.py`), the HTTP sessions."""

__all__ = ["api_server", "openai", "reasoning", "sampling_notes", "sglang", "trl", "vllm"]
