# SPDX-License-Identifier: Apache-2.0
"""A cache of blocks on the hlo target: the eager target's tokens, and the same bits wherever a row's blocks are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    artifact_runner,
    decode_tokens,
    eager_runner,
    export_tiny,
    load_model,
    prefill_pieces,
    random_tokens,
    read_state,
    tiny_config,
    write_state,
)
from tiny import TINY_SIZES
from torch import Tensor

from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.tools.check.checks import check_artifact


BLOCK, TOKENS = 64, 512
SLOTS: dict[str, Any] = {
    "sequence_length": 256, "context_buckets": (128, 256), "prefill_chunk_size": 32, "mixed_step": False,
}  # fmt: skip
BLOCKS = SLOTS | {"kv_block_size": BLOCK, "kv_cache_tokens": TOKENS}
PROMPT = random_tokens(120)
OTHER = random_tokens(40, seed=3)
STATES = [f"kv_cache.{role}_{layer}" for layer in range(TINY_SIZES["num_hidden_layers"]) for role in ("key", "value")]


def answer(runner: GraphRunner, slot: int, others: Sequence[int] = (), tokens: int = 12) -> list[Tensor]:
    """Logits after a prompt and after each of some more tokens, which reach into another block."""
    logits = [prefill_pieces(runner, slot, PROMPT, [32, 32, 32, 24])]
    for index in range(tokens):
        fed = {slot: 3 + index} | dict.fromkeys(others, 5 + index)
        logits.append(decode_tokens(runner, fed)[1][slot])
    return logits


def fill(runner: GraphRunner, value: float) -> None:
    for name in STATES:
        write_state(runner.executable, name, torch.full_like(read_state(runner.executable, name), value))


def in_blocks(runner: GraphRunner, slot: int, blocks: Sequence[int], tokens: int = 12) -> list[Tensor]:
    """With a neighbor, and NaN in all blocks that nobody has used."""
    runner.reset_slots()
    fill(runner, torch.nan)
    neighbor = (slot + 1) % runner.config.batch_size
    rest = [block for block in range(runner.config.kv_blocks) if block not in blocks]
    runner.assign_blocks(neighbor, 0, rest[:1])
    prefill_pieces(runner, neighbor, OTHER, [32, 8])
    runner.assign_blocks(slot, 0, blocks)
    return answer(runner, slot, [neighbor], tokens)


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def close(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all((one - other).abs().max() < 1e-5 for one, other in zip(left, right, strict=True))


@pytest.fixture(scope="module")
def exported(sharp_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("blocks") / "llama"
    return export_tiny(sharp_checkpoints["llama"], path, **BLOCKS, target="hlo")


@pytest.fixture(scope="module")
def runner(exported: Path) -> GraphRunner:
    return artifact_runner(exported)


@pytest.fixture(scope="module")
def expected(sharp_checkpoints: dict[str, Path]) -> list[Tensor]:
    return answer(eager_runner(load_model(sharp_checkpoints["llama"]), tiny_config(**SLOTS)), 1)


def test_blocks_give_the_logits_of_slots_and_no_bit_depends_on_where_they_are(
    runner: GraphRunner, expected: list[Tensor]
) -> None:
    found = in_blocks(runner, 0, (0, 1, 2))
    assert close(found, expected)
    for row, own in ((0, (1, 3, 0)), (1, (2, 0, 1)), (2, (3, 1, 2))):  # in the first half of the cache
        assert same(in_blocks(runner, row, own), found)


def test_a_graph_reads_the_blocks_up_to_the_highest_in_use(runner: GraphRunner, expected: list[Tensor]) -> None:
    runner.graph_calls.clear()
    in_blocks(runner, 1, (2, 0, 1), 3)
    assert runner.graph_calls["token_generation_context128"] == 3
    runner.graph_calls.clear()
    assert close(in_blocks(runner, 1, (2, 0, 7)), expected)
    # The third block is read from the position behind its first on: the prompt and 8 more tokens are in the others.
    assert runner.graph_calls["token_generation_context128"] == 9
    assert runner.graph_calls["token_generation_context256"] == 3


def test_a_shared_block_gives_the_bits_of_own_ones(runner: GraphRunner) -> None:
    assert runner.config.shared_blocks == 1
    alone = in_blocks(runner, 1, (4, 6, 1))
    runner.reset_slots()
    fill(runner, torch.nan)
    runner.assign_blocks(1, 0, (4, 6, 1))
    runner.assign_blocks(2, 0, (4, 3, 5))
    first = [prefill_pieces(runner, 1, PROMPT, [32, 32, 32, 24])]
    runner.resume_slot(2, BLOCK)
    second = [prefill_pieces(runner, 2, PROMPT[BLOCK:], [32, 24])]
    for index in range(12):
        logits = decode_tokens(runner, {1: 3 + index, 2: 3 + index})[1]
        first.append(logits[1])
        second.append(logits[2])
    assert same(first, alone) and same(second, alone)


def test_rows_that_share_more_than_a_graph_has_places_for_take_runs_of_their_own(runner: GraphRunner) -> None:
    prompt = random_tokens(140, seed=5)

    def step(shared: int) -> tuple[Tensor, Tensor, int]:
        runner.reset_slots()
        fill(runner, torch.nan)
        runner.assign_blocks(0, 0, (7,))
        prefill_pieces(runner, 0, OTHER[:20], [20])
        runner.assign_blocks(1, 0, (4, 6, 1))
        prefill_pieces(runner, 1, prompt, [32] * 4 + [12])
        runner.assign_blocks(2, 0, (*(4, 6)[:shared], 0, 2, 3)[:3])
        if shared:
            runner.resume_slot(2, shared * BLOCK)
        rest = prompt[shared * BLOCK :]
        prefill_pieces(runner, 2, rest, [32] * (len(rest) // 32) + [len(rest) % 32])
        runner.graph_calls.clear()
        tokens, logits = decode_tokens(runner, {0: 9, 1: 3, 2: 3})
        return tokens, logits, sum(runner.graph_calls.values())

    tokens, logits, runs = step(0)
    assert runs == 1
    for shared, needed in ((1, 1), (2, 2)):
        found = step(shared)
        assert torch.equal(found[0], tokens) and torch.equal(found[1], logits) and found[2] == needed
    assert runner.lengths.tolist() == [21, 141, 141]


def test_part_of_a_block_is_copied_on_the_device(runner: GraphRunner, expected: list[Tensor]) -> None:
    runner.reset_slots()
    runner.assign_blocks(1, 0, (4, 6))
    prefill_pieces(runner, 1, PROMPT[:100], [32, 32, 32, 4])
    runner.assign_blocks(2, 0, (4, 2, 3))
    runner.copy_block(6, 2, 30)
    runner.resume_slot(2, 94)
    logits = [prefill_pieces(runner, 2, PROMPT[94:], [26])]
    for index in range(12):
        logits.append(decode_tokens(runner, {2: 3 + index})[1][2])
    assert close(logits, expected)


def test_an_artifact_of_blocks_passes_all_checks(exported: Path) -> None:
    report = check_artifact(Artifact.open(exported), runs=1)
    left = {result.name: result.problem for result in report.results if result.status != "passed"}
    # It was exported without --certify, keeps no state but keys and values, and hlo has no device memory.
    assert report.passed and list(left) == ["certificate", "snapshots", "memory"], left
