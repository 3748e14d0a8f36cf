"""The borders between packed sequences that flash attention is given are those that it would read off the positions."""

import dataclasses

import pytest
import torch
from transformers import modeling_flash_attention_utils as flash

from example_trainer.data import DataOptions, make_batch
from tests.trainer.helpers_trainer import make_group

OPTIONS = DataOptions(seq_len=64, max_sequences=1, max_tokens=40, layout="packed")


@pytest.mark.parametrize("multiple", [1, 8])
def test_flash_attention_finds_every_packed_sequence_and_the_filling(multiple: int) -> None:
    options = dataclasses.replace(OPTIONS, pad_to_multiple_of=multiple)
    groups = [make_group([1.0, 0.0, 0.3], seed=s, length=6 + 4 * s) for s in range(3)]
    batch = make_batch(groups, options)
    assert len(batch.micro_batches) > 1
    found = []
    for micro_batch in batch.micro_batches:
        positions = micro_batch.position_ids_BT
        assert flash._is_packed_sequence(positions, batch_size=len(positions))
        (borders, _), _ = flash.prepare_fa_kwargs_from_position_ids(positions)
        assert micro_batch.borders is not None
        assert torch.equal(micro_batch.borders, borders)
        assert micro_batch.longest == max(lengths := borders.diff().tolist())
        if sum(row_lengths := lengths[: micro_batch.positions.num_sequences]) < positions.numel():
            assert lengths == [*row_lengths, positions.numel() - sum(row_lengths)]
        found += row_lengths
    assert sorted(found) == sorted(len(row.tokens) for row in batch.rows)
