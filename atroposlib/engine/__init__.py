"""The local engine: a small OpenAI-compatible inference server with vLLM's routes and bodies.

For laptops, CI and the demo; serves any transformers causal LM on a CPU or one GPU. `server.py` is HTTP, `bodies.py`
reads and writes its bodies, `scheduler.py` batches sequences at each decode step, `cache.py` holds keys and values,
`sampling.py` chooses tokens, `weights.py` replaces the parameters. README.md lists what it refuses.
"""

__all__ = ["bodies", "cache", "command", "sampling", "scheduler", "server", "weights"]
