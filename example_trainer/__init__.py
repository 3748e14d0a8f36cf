"""The reference trainer: batches from the hub, a GRPO step, new weights to the engines."""
