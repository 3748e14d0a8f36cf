"""The original's import paths of the inference layer, which is `atroposlib.inference`."""

__all__ = [
    "managed_server",
    "managed_server_proxy",
    "openai_server",
    "proxy_client",
    "server_baseline",
    "server_harness",
    "server_manager",
    "sglang_server",
    "tool_call_translator",
    "trl_vllm_server",
    "vllm_server",
]
