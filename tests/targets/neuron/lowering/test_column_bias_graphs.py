# SPDX-License-Identifier: Apache-2.0
"""Models that add a bias by column to their scores (ALiBi), lowered: linted, certified, and the tokens of eager steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from biased import BLOCKS, PIECES, SIZES, answers, model_of, same
from helpers import artifact_runner, eager_runner, export_tiny, tiny_config

from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.targets.neuron.lowering import decompositions
from optimum_neuron.targets.neuron.sharding import shard_plan


BUCKETS: dict[str, Any] = SIZES | {"context_buckets": (64, 192)}
with_models = pytest.mark.parametrize(
    "name", ["bloom", *(pytest.param(each, marks=pytest.mark.full) for each in ("mpt", "falcon"))]
)


@with_models
@pytest.mark.parametrize(
    "sizes",
    [SIZES, *(pytest.param(each, marks=pytest.mark.full) for each in (BUCKETS, BLOCKS))],
    ids=["slots", "buckets", "blocks"],
)
def test_graphs_are_linted_certified_and_choose_as_eager_steps_do_at_any_cut(
    name: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    model_of(name).save_pretrained(tmp_path / "checkpoint")
    folder = export_tiny(tmp_path / "checkpoint", tmp_path / "hlo", **sizes, target="hlo", certificate=True)
    runner, eager = artifact_runner(folder), eager_runner(model_of(name), tiny_config(**SIZES))
    if sizes is BLOCKS:
        runner.assign_blocks(1, 0, (5, 0, 2))
        runner.assign_blocks(2, 0, (3, 4))
    found, expected = (answers(each, 1, PIECES[0]) for each in (runner, eager))
    for one, other in zip(found, expected, strict=True):
        assert one.argmax() == other.argmax()
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    if sizes is not BLOCKS:
        # In the largest graph alone, neither cuts nor slots change a bit.
        alone = GraphRunner(runner.executable, runner.config, list(runner.family), deterministic=True)
        alone.reset_slots()
        found = answers(alone, 1, PIECES[0])
        alone.reset_slots()
        assert same(answers(alone, 0, PIECES[1]), found)


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon"])
def test_ranks_share_no_model_that_attends_in_code_of_its_own(name: str) -> None:
    words = "cannot be shared by tensor_parallel_size=2 ranks: it attends in code of its own, .*; use tensor_parallel_size=1"
    with pytest.raises(ValueError, match=words):
        shard_plan(model_of(name), 2)


@pytest.mark.parametrize("length", [1, 2, 7, 64, 100])
def test_running_sums_of_whole_numbers_are_torchs(length: int) -> None:
    numbers = torch.randint(-9, 9, (3, length, 2))
    for x in (numbers, numbers.float(), numbers.bool(), numbers.int()):
        for dim in (1, -2):
            found = decompositions.running_sum(x, dim)
            assert found.dtype == x.cumsum(dim).dtype and torch.equal(found, x.cumsum(dim))
    assert decompositions.running_sum(torch.ones(()), 0) == 1
