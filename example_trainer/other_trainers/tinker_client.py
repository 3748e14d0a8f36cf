"""Train through the Tinker API (written for tinker 0.38): its service, or a server that speaks it.

The hub gives the batches; the server makes the steps and keeps weights and optimizer. Losses there are sums over
tokens, so that the length of the gradient grows with the batch: Adam does not mind, and `grad_clip_norm` has to allow
for it.
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
    """Take `run.num_steps` steps, the policy version of each being its number; version 0 are the weights as they are.

    `publish(path, version)` makes the engine that environments ask sample from the weights saved at `path`, a Tinker
    URI, before the hub tells environments of the version.
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
    """Take one optimizer step on a batch. Sequences without any advantage are not sent: they have no gradient."""
    trained = [sample for sample in samples(batch) if sample.advantages.any()]
    supervised = [to_datum(sample) for sample in trained if sample.is_supervised]
    sampled = [to_datum(sample) for sample in trained if not sample.is_supervised]
    # All are sent before the first is waited for: the server takes them in order, within one of its clock cycles.
    futures = [client.forward_backward(sampled, "importance_sampling")] if sampled else []
    if supervised:
        futures.append(client.forward_backward(supervised, "cross_entropy"))
    step = client.optim_step(adam)
    for future in futures:
        future.result()
    step.result()


def to_datum(sample: Sample) -> tinker.Datum:
    """Shift by one, as Tinker wants it: position t of every array is about the token that the t-th input predicts.

    A supervised sequence becomes one for the loss "cross_entropy", any other one for "importance_sampling".
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
