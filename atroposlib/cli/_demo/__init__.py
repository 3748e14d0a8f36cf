"""Parts of `atropos-demo`; `benchmarks` import some of them, nothing else does."""
