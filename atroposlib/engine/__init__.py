"""The local engine: a small OpenAI-compatible inference server with vLLM's routes and bodies.

For laptops, CI and the demo; serves any transformers causal LM on a CPU or one GPU. `config.py` has the settings,
`server.py` is HTTP, `loading.py` makes a model ready, `bodies.py` reads requests, `rendering.py` writes answers,
`scheduler.py` batches the sequences of `sequences.py` at each decode step, `cache.py` holds keys and values,
`sampling.py` chooses tokens, `weights.py` replaces the parameters. README.md lists what it refuses.
"""

__all__ = [
    "rendering",
    "bodies",
    "cache",
    "config",
    "loading",
    "sampling",
    "scheduler",
    "sequences",
    "server",
    "weights",
]
