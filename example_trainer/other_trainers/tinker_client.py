"""Train through the Tinker API (written for tinker 0.38): its service, or a compatible server.

The server takes the steps and holds weights and optimizer. Its losses are sums over tokens, so the gradient norm grows
with the batch: this does not affect Adam, but `grad_clip_norm` must allow for it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tinker

from atroposlib.client import LeasedBatch, Sample, TrainerClient, TrainerRegistration, samples


def train(
    hub: TrainerClient,
    run: TrainerRegistration,
    client: tinker.TrainingClient,
    publish: Callable[[str, int], None],
    *,
    adam: tinker.AdamParams,
) -> None:
    """Take `run.num_steps` steps; step n makes policy version n, and version 0 is the initial weights.

    `publish(path, version)` must make the environments' engine sample from the weights at `path`, a Tinker URI; the
    version is reported to the hub after it returns.
    """
    hub.register(run)
    for step in range(run.num_steps + 1):
        if step:
            while (batch := hub.lease_batch(wait_s=30)) is None:
                pass
            with hub.holding(batch):
                update(client, batch, adam=adam)
            hub.ack(batch, step=step)
        publish(client.save_weights_for_sampler(f"step-{step}").result().path, step)
        hub.publish_policy(step)


def update(client: tinker.TrainingClient, batch: LeasedBatch, *, adam: tinker.AdamParams) -> None:
    """Take one optimizer step on a batch; sequences whose advantages are all 0 have no gradient and are not sent."""
    trained = [sample for sample in samples(batch) if sample.advantages.any()]
    supervised = [to_datum(sample) for sample in trained if sample.is_supervised]
    sampled = [to_datum(sample) for sample in trained if not sample.is_supervised]
    # Send all before waiting for any: the server then runs them in order within one of its clock cycles.
    futures = [client.forward_backward(sampled, "importance_sampling")] if sampled else []
    if supervised:
        futures.append(client.forward_backward(supervised, "cross_entropy"))
    step = client.optim_step(adam)
    for future in futures:
        future.result()
    step.result()


def to_datum(sample: Sample) -> tinker.Datum:
    """Shift by one, as Tinker requires: position t of every array belongs to the token that input t predicts.

    A supervised sequence gets the inputs of the loss "cross_entropy", any other those of "importance_sampling".
    """
    trained = sample.completion_mask[1:]
    inputs = {"target_tokens": sample.input_ids[1:].astype(np.int64)}
    if sample.is_supervised:
        inputs["weights"] = trained.astype(np.float32)
    else:
        inputs["logprobs"] = np.where(trained, sample.sampled_logprobs[1:], 0).astype(np.float32)
        inputs["advantages"] = sample.advantages[1:].astype(np.float32)
    tokens = tinker.ModelInput.from_ints(sample.input_ids[:-1].tolist())
    return tinker.Datum(model_input=tokens, loss_fn_inputs=inputs)
