# SPDX-License-Identifier: Apache-2.0
"""A cache of blocks computes what slots compute, to the bit, wherever a row's blocks are and whoever has the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from helpers import (
    artifact_runner,
    decode_tokens,
    eager_runner,
    export_tiny,
    prefill_pieces,
    random_tokens,
    tiny_config,
    write_state,
)
from torch import Tensor, nn

from optimum_neuron.core import PromptPiece
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.state_specs import state_specs


BLOCK, TOKENS = 64, 512
SLOTS = {"sequence_length": 256, "context_buckets": (256,), "prefill_chunk_size": 32}
BLOCKS = SLOTS | {"kv_block_size": BLOCK, "kv_cache_tokens": TOKENS}
PIECES = ([32] * 4 + [20], [64, 64, 20], [1, 30, 60, 40, 17])
PROMPT = random_tokens(148)


def answer(
    runner: GraphRunner, slot: int, pieces: Sequence[int], neighbor: int | None = None, prompt: np.ndarray = PROMPT
) -> list[Tensor]:
    """Logits after a prompt and after each of 50 more tokens, which reach into another block."""
    logits = [prefill_pieces(runner, slot, prompt, pieces)]
    for index in range(50):
        tokens = {slot: 3 + index} | ({} if neighbor is None else {neighbor: 5 + index})
        logits.append(decode_tokens(runner, tokens)[1][slot])
    return logits


def block_answer(
    runner: GraphRunner, spec: ModelSpec, slot: int, blocks: Sequence[int], pieces: Sequence[int]
) -> list[Tensor]:
    """With a neighbor that has the rest of the blocks, and NaN in all that nobody has used."""
    runner.reset_slots()
    for state in state_specs(runner.config, spec):
        write_state(runner.executable, state.name, torch.full(state.shape, torch.nan))
    neighbor = (slot + 1) % runner.config.batch_size
    rest = [block for block in range(runner.config.kv_blocks) if block not in blocks]
    runner.assign_blocks(neighbor, 0, rest[:4])
    prefill_pieces(runner, neighbor, random_tokens(100, seed=slot), [64, 36])
    runner.assign_blocks(slot, 0, blocks[:3])
    runner.assign_blocks(slot, 3, blocks[3:])
    return answer(runner, slot, pieces, neighbor)


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


class Pair(NamedTuple):
    """Runners of one model: with slots, and with blocks."""

    slots: GraphRunner
    blocks: GraphRunner
    spec: ModelSpec


@pytest.fixture(scope="module")
def exported(
    tiny_checkpoints: dict[str, Path], tiny_specs: dict[str, ModelSpec], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Pair]:
    def export(model: str) -> Pair:
        folder = tmp_path_factory.mktemp("blocks")
        sizes = {"slots": SLOTS, "blocks": BLOCKS}
        paths = [export_tiny(tiny_checkpoints[model], folder / name, **sizes[name], target="cpu") for name in sizes]
        return Pair(*map(artifact_runner, paths), tiny_specs[model])

    return export


CASES = ((0, (0, 1, 2, 3), PIECES[0]), (1, (7, 0, 5, 2), PIECES[1]), (2, (3, 6, 1, 4), PIECES[2]))
MODELS = ("llama", "gpt_oss", "lfm2", pytest.param("deepseek_v3", marks=pytest.mark.full))


def check_pair(pair: Pair) -> None:
    pair.slots.reset_slots()
    expected = answer(pair.slots, 1, PIECES[0])
    for row, own, pieces in CASES:
        assert same(block_answer(pair.blocks, pair.spec, row, own, pieces), expected)


@pytest.mark.parametrize("model", ("llama", "gemma2", "gpt_oss", "deepseek_v3", "lfm2"))
def test_blocks_give_the_bits_of_slots_on_the_eager_target(
    tiny_models: dict[str, nn.Module], tiny_specs: dict[str, ModelSpec], model: str
) -> None:
    runners = (eager_runner(tiny_models[model], tiny_config(**sizes)) for sizes in (SLOTS, BLOCKS))
    check_pair(Pair(*runners, tiny_specs[model]))


@pytest.mark.parametrize("model", MODELS)
def test_blocks_give_the_bits_of_slots_on_the_cpu_target(exported: Callable[[str], Pair], model: str) -> None:
    check_pair(exported(model))


def test_rows_read_a_whole_block_together_and_part_of_it_as_a_copy(
    tiny_models: dict[str, nn.Module], tiny_specs: dict[str, ModelSpec]
) -> None:
    runner = eager_runner(tiny_models["llama"], tiny_config(**BLOCKS))
    expected = block_answer(runner, tiny_specs["llama"], *CASES[0])
    for held, own in ((128, (4, 6, 3, 5)), (94, (4, 2, 3, 5))):
        runner.reset_slots()
        runner.assign_blocks(1, 0, (4, 6))
        prefill_pieces(runner, 1, PROMPT[:128], [64, 64])
        runner.assign_blocks(2, 0, own)
        if held < 128:
            runner.copy_block(6, 2, 30)
        runner.resume_slot(2, held)
        assert same(answer(runner, 2, [len(PROMPT) - held], prompt=PROMPT[held:]), expected)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (lambda runner: runner.run_step([PromptPiece(1, PROMPT[:1])]), "slot 1 holds 0 tokens and has blocks for 0: assign"),
        (lambda runner: runner.assign_blocks(0, 0, (8,)), r"is given the blocks \[8\], and there are 8"),
        (lambda runner: runner.assign_blocks(0, 0, (-1,)), r"is given the blocks \[-1\]"),
        (lambda runner: runner.assign_blocks(0, 2, (1,)), "has 1 of at most 4 blocks: 1 cannot follow block 2"),
        (lambda runner: runner.assign_blocks(0, 1, (1, 2, 3, 4)), "has 1 of at most 4 blocks"),
        (lambda runner: runner.resume_slot(0, 65), "has room for 64 tokens: 65 of them cannot be resumed"),
        (lambda runner: runner.copy_block(0, 8, 3), "3 tokens of block 0 cannot be copied to block 8"),
        (lambda runner: runner.copy_block(0, 1, 65), "65 tokens of block 0 cannot be copied"),
        (lambda runner: runner.reserve_slots([256, 256, 1]), "take 576 tokens of the cache in blocks of 64"),
    ],
)  # fmt: skip
def test_what_blocks_do_not_hold_is_refused(
    tiny_models: dict[str, nn.Module], action: Callable[[GraphRunner], object], words: str
) -> None:
    runner = eager_runner(tiny_models["llama"], tiny_config(**BLOCKS))
    runner.assign_blocks(0, 0, (3,))
    with pytest.raises(ValueError, match=words):
        action(runner)
    assert runner.tables is not None and runner.tables.counts.tolist() == [1, 0, 0]
    assert not np.asarray(runner.lengths).any()
