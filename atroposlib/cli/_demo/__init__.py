"""Parts of `atropos-demo`; `benchmarks/learning_curves.py` imports some of them, nothing else does."""
