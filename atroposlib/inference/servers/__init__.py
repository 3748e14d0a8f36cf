"""One class per kind of inference server, and what they share: the limiter, the retries, the HTTP sessions."""

__all__ = [
    "api_server",
    "choices",
    "concurrency",
    "http_peer",
    "limiter",
    "openai",
    "openai_routes",
    "pacing",
    "reasoning",
    "sampling_notes",
    "sglang",
    "token_ids",
    "trl",
    "vllm",
    "vllm_bodies",
]
