"""Commands; each starts the other parts as processes and never imports them."""

__all__ = [
    "demo",
    "dpo",
    "inference_node_wandb_watcher",
    "plot_run",
    "run_api",
    "sft",
    "view_run",
    "view_run_multimodal",
]
