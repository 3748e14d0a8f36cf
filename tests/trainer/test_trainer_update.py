"""The whole way from groups to an update, against a slow reference in float64 that shares no code with it.

The groups hold what batches of real runs hold: a group of one, completions of one token, sequences without a trained
token or too long, supervised ones, advantages per token, references and teachers for some groups only.
"""

import copy
import itertools
import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from atroposlib.scored_data import Strictness, check_group
from example_trainer.data import make_batch
from example_trainer.gap import LogprobGap
from example_trainer.model import Policy, load_policy, reference_of
from example_trainer.objective import OBJECTIVES
from example_trainer.step import data_options, take_step
from tests.trainer.helpers_run import config_for

SEQ_LEN = 24
VOCABULARY = 256
ENTROPY = {"entropy_coef": 0.05}
EVERYTHING = {"kl_coef": 0.3, "entropy_coef": 0.05, "distill_coef": 0.4}


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Any:
    """The same model in float64."""
    return AutoModelForCausalLM.from_pretrained(model_dir).double()


@pytest.fixture(scope="module")
def policy(model_dir: Path) -> Policy:
    return load_policy(config_for(model_dir, model_dir))


@pytest.fixture(scope="module")
def groups(model: Any) -> list[dict[str, Any]]:
    rng = np.random.default_rng(3)

    def group(scores: list[float], shapes: list[tuple[int, int]], **fields: Any) -> dict[str, Any]:
        """`shapes`: prompt and completion lengths."""
        tokens = [rng.integers(0, VOCABULARY, p + c).tolist() for p, c in shapes]
        masks = [[-100] * p + row[p:] for row, (p, _) in zip(tokens, shapes, strict=True)]
        own = [table_of(model, row) for row in tokens]
        noise = [0.3 * rng.standard_normal(len(row)) for row in tokens]
        sampled = [
            [1.0] * p + [float(table[t - 1, row[t]] + n[t]) for t in range(p, p + c)]
            for table, row, n, (p, c) in zip(own, tokens, noise, shapes, strict=True)
        ]
        return {
            "tokens": tokens,
            "masks": masks,
            "scores": scores,
            "inference_logprobs": sampled,
        } | fields

    def per_token(shapes: list[tuple[int, int]], low: float, high: float) -> list[list[float]]:
        return [rng.uniform(low, high, p + c).tolist() for p, c in shapes]

    a, b = [(3, 5), (3, 1), (2, 9)], [(1, 4), (5, 7)]
    teacher_ids = [[[t % 7, 90 + t % 5][: t % 3] for t in range(p + c)] for p, c in a]
    first = group(
        [1.0, 0.0, 0.25],
        a,
        ref_logprobs=per_token(a, -6, -4),
        distill_token_ids=teacher_ids,
        distill_logprobs=[[[-0.5, -1.5][: len(k)] for k in row] for row in teacher_ids],
    )
    tokens = first["tokens"][0]  # a ratio that one objective clips and another does not
    first["inference_logprobs"][0][3] = float(table_of(model, tokens)[2, tokens[3]]) - math.log(
        1.24
    )
    return [
        first,
        group([0.5, -1.0], b, advantages=per_token(b, -1, 1)),
        group([2.0], [(4, 6)]),
        group([0.1, 0.1, 0.1], [(2, 3), (2, 4), (2, 5)]),
        group([1.0, 0.0, 3.0, 5.0], [(3, 4), (3, 6), (6, 0), (20, 9)]),  # untrained, too long
        group(
            [1.0, 0.0, -1.0],
            [(3, 4), (2, 6), (2, 3)],
            overrides=[{}, {"sft": True}, {"set_advantage_to_zero": True}],
            ref_logprobs=None,
        ),
    ]


def table_of(model: Any, tokens: list[int]) -> Any:
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1).numpy()


class Row(NamedTuple):
    tokens: list[int]
    at: list[int]
    advantages: list[float]
    sampled: list[float]
    reference: list[float] | None
    teacher: list[dict[int, float]]
    supervised: bool
    silenced: bool


def slow_rows(groups: list[dict[str, Any]], baseline: str, *, scale: bool) -> list[Row]:
    rows: list[Row] = []
    for group in groups:
        overrides = group.get("overrides") or [{} for _ in group["scores"]]
        compared = zip(group["scores"], overrides, group["masks"], strict=True)
        scores = [s for s, o, m in compared if "sft" not in o and set(m[1:]) != {-100}]
        for i, tokens in enumerate(group["tokens"]):
            score, override = group["scores"][i], overrides[i]
            at = [t for t in range(1, len(tokens)) if group["masks"][i][t] != -100]
            if len(scores) == 1 or baseline in ("none", "batch"):
                advantage = score
            elif baseline == "rloo":
                advantage = score - (sum(scores) - score) / (len(scores) - 1)
            else:
                advantage = score - statistics.fmean(scores)
                if scale and baseline == "group":
                    advantage /= statistics.pstdev(scores) + 1e-4
            if len(set(scores)) == 1 < len(scores) and baseline not in ("none", "batch"):
                advantage = 0.0
            advantages = [advantage] * len(at)
            if group.get("advantages"):
                advantages = [group["advantages"][i][t] for t in at]
            silenced = "set_advantage_to_zero" in override
            if silenced:
                advantages = [0.0] * len(at)
            supervised = "sft" in override
            if supervised:
                advantages = [1.0] * len(at)
            references = group.get("ref_logprobs")
            ids = group.get("distill_token_ids")
            teacher: list[dict[int, float]] = [{} for _ in at]
            if ids:
                teacher = [
                    dict(zip(ids[i][t], group["distill_logprobs"][i][t], strict=True)) for t in at
                ]
            rows.append(
                Row(
                    tokens=tokens,
                    at=at,
                    advantages=advantages,
                    sampled=[group["inference_logprobs"][i][t] for t in at],
                    reference=[references[i][t] for t in at] if references else None,
                    teacher=teacher,
                    supervised=supervised,
                    silenced=silenced,
                )
            )
    if baseline in ("batch", "group_batch"):
        counted = [a for r in rows if not r.supervised and not r.silenced for a in r.advantages]
        mean = statistics.fmean(counted) if baseline == "batch" else 0.0
        std = statistics.pstdev(counted) + 1e-8
        rows = [
            r
            if r.supervised or r.silenced
            else r._replace(advantages=[(a - mean) / std for a in r.advantages])
            for r in rows
        ]
    return [row for row in rows if row.at and len(row.tokens) <= SEQ_LEN]


def slow_update(
    model: Any, groups: list[dict[str, Any]], settings: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the gradient of the loss by parameter, one token after the other."""
    rows = slow_rows(
        groups, settings.get("baseline", "group"), scale=settings.get("scale_advantages", True)
    )
    low = 1 - settings.get("clip_eps", 0.2)
    high = 1 + (settings.get("clip_eps_high") or settings.get("clip_eps", 0.2))
    surrogate = settings.get("surrogate", "clip")
    num_tokens = sum(len(row.at) for row in rows)
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        table = torch.log_softmax(model(torch.tensor([row.tokens])).logits[0], -1)
        initial = table.detach()
        own = [table[t - 1, row.tokens[t]] for t in row.at]
        mean_gap = sum(o - s for o, s in zip(own, row.sampled, strict=True)) / len(own)
        weight = {
            "token": 1 / num_tokens,
            "sequence": 1 / (len(rows) * len(row.at)),
            "constant": 1 / (len(rows) * SEQ_LEN),
        }[settings.get("loss_mean", "token")]
        for n, t in enumerate(row.at):
            advantage = row.advantages[n]
            is_by_sequence = settings.get("ratio_level") == "sequence"
            gap = mean_gap if is_by_sequence else own[n] - row.sampled[n]
            ratio = torch.exp(gap)
            if row.supervised or surrogate == "reinforce":
                loss = -advantage * own[n]
            elif surrogate == "cispo":
                loss = -min(max(float(ratio.detach()), low), high) * advantage * own[n]
            else:
                loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
            if settings.get("kl_coef"):
                reference = row.reference[n] if row.reference else initial[t - 1, row.tokens[t]]
                d = reference - own[n]
                own_now = own[n].detach()
                moved = 1.0 if row.supervised else math.exp(own_now - row.sampled[n])
                if settings.get("kl_estimator") == "k2":
                    kl = d * d / 2
                else:
                    kl = torch.exp(own[n] - own_now) * (torch.exp(d) - d - 1)
                loss = loss + settings["kl_coef"] * moved * kl
            if settings.get("entropy_coef"):
                p = table[t - 1]
                loss = loss + settings["entropy_coef"] * (p.exp() * p).sum()
            if settings.get("distill_coef"):
                for token, wanted in row.teacher[n].items():
                    kl = math.exp(wanted) * (wanted - table[t - 1, token])
                    loss = loss + settings["distill_coef"] * kl
            total = total + weight * loss
    model.zero_grad()
    total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def plain_updates(model: Any, groups: list[dict[str, Any]]) -> dict[str, dict[str, torch.Tensor]]:
    """The slow updates of the objectives without further terms."""
    return {name: slow_update(model, groups, changes) for name, changes in OBJECTIVES.items()}


class Update(NamedTuple):
    taken: dict[str, torch.Tensor]
    """What one step of plain SGD subtracts from the parameters."""
    num_micro_batches: int


def found_update(
    policy: Policy, groups: list[dict[str, Any]], settings: dict[str, Any], reference: Any
) -> Update:
    """Take one step and undo it."""
    settings = {"batch_size": 100, "lr": 1.0} | settings
    config = config_for(Path(), Path(), seq_len=SEQ_LEN, max_grad_norm=1e9, **settings)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    checked = [check_group(group, strictness=Strictness.MEANING) for group in groups]
    batch = make_batch(checked, data_options(config))
    optimizer = torch.optim.SGD(policy.model.parameters(), lr=config.lr)
    take_step(policy, optimizer, batch, config, 0, LogprobGap(policy, limit=None), reference)
    after = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    policy.model.load_state_dict(before, strict=False)
    taken = {name: (value - after[name]).double() for name, value in before.items()}
    return Update(taken, len(batch.micro_batches))


LAYOUTS: dict[str, dict[str, Any]] = {
    "one micro-batch": {},
    "many micro-batches": {"batch_size": 2},
    "packed": {"packing": "on"},
    "packed, many micro-batches": {"packing": "on", "max_microbatch_tokens": 24},
    "wide padding": {"pad_to_multiple_of": 64, "batch_size": 3},
}


@pytest.mark.parametrize("extra", [{}, EVERYTHING], ids=["plain", "every term"])
@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_the_update_of_every_objective_and_layout_is_that_of_a_slow_reference(
    policy: Policy,
    model: Any,
    groups: list[dict[str, Any]],
    plain_updates: dict[str, dict[str, torch.Tensor]],
    name: Any,
    extra: dict[str, Any],
) -> None:
    wanted = plain_updates[name]
    if extra:
        wanted = slow_update(model, groups, OBJECTIVES[name] | extra)
    reference = copy.deepcopy(policy) if extra else None
    for layout, changes in LAYOUTS.items():
        settings = {"objective": name} | extra | changes
        found = found_update(policy, groups, settings, reference)
        assert (found.num_micro_batches > 2) == ("many" in layout or "wide" in layout)
        assert_same_update(found.taken, wanted)


def test_an_entropy_bonus_alone_reaches_sequences_without_an_advantage(
    policy: Policy, model: Any, groups: list[dict[str, Any]]
) -> None:
    wanted = slow_update(model, groups, ENTROPY)
    assert_same_update(found_update(policy, groups, ENTROPY, None).taken, wanted)


def assert_same_update(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    size = max(float(value.abs().max()) for value in wanted.values())
    assert size > 1e-3
    for parameter, value in wanted.items():
        # Weights of about 1 lose what float32 rounds off their differences.
        torch.testing.assert_close(
            found[parameter], value, rtol=1e-4, atol=2e-6 + 1e-5 * size, msg=parameter
        )


def test_an_objective_can_be_told_from_another_by_its_update(
    plain_updates: dict[str, dict[str, torch.Tensor]],
) -> None:
    """Else the test above would show nothing."""
    weights = [update["lm_head.weight"] for update in plain_updates.values()]
    for one, other in itertools.combinations(weights, 2):
        assert float((one - other).abs().max()) > 1e-4


def test_a_sharded_reference_is_whole_only_in_its_forward_pass(
    model_dir: Path, groups: list[dict[str, Any]]
) -> None:
    """Embedding and head would stay whole in every process, beside the policy's."""
    config = config_for(model_dir, model_dir, kl_coef=0.1, cpu_offload=True)
    policy = load_policy(config)
    reference = reference_of(policy, config)
    assert isinstance(reference, Policy)
    checked = [check_group(groups[0], strictness=Strictness.MEANING)]
    with torch.no_grad():
        reference.logprobs(make_batch(checked, data_options(config)).micro_batches[0])
    assert all(isinstance(value, DTensor) for value in reference.model.parameters())
