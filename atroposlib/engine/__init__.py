"""The local engine: a small OpenAI-compatible inference server that speaks vLLM's routes and bodies.

For laptops, CI and the demo; over any transformers causal LM, on a CPU or one GPU. `server.py` is HTTP, `protocol.py`
reads and writes its bodies, `scheduler.py` decides what runs at each decode step, `cache.py` holds keys and values,
`sampling.py` chooses tokens, `weights.py` swaps the parameters. See README.md for what it refuses.
"""

__all__ = ["bodies", "cache", "command", "sampling", "scheduler", "server", "weights"]
