# SPDX-License-Identifier: Apache-2.0
"""Models that attend by code of their own have blocks too: the bits of slots, wherever these lie and whoever has the others."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from architectures.models import graph_model
from helpers import (
    artifact_runner,
    as_tensor,
    decode_rows,
    eager_runner,
    export_tiny,
    prefill_pieces,
    tiny_config,
    write_state,
)
from torch import Tensor, nn

from optimum_neuron.core import PromptPiece
from optimum_neuron.parity.inspect import check_states, inspect_model
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.attention.state import KeyValueState
from optimum_neuron.step.cache_needs import CacheNeeds
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.state_specs import state_specs


MODELS = ("codegen", "gptj")
OTHERS = ("gpt_neox_japanese", "megatron-bert", "rembert", "xglm")
SLOTS = {"sequence_length": 256, "context_buckets": (256,), "prefill_chunk_size": 32}
BLOCKS = SLOTS | {"kv_block_size": 64, "kv_cache_tokens": 512}
GENERATOR = torch.Generator().manual_seed(3)
PROMPT, OTHER = (
    torch.randint(3, 60, (count,), generator=GENERATOR, dtype=torch.int32).numpy() for count in (122, 140)
)
PIECES = ([32, 32, 32, 26], [64, 58], [1, 30, 60, 31])
# The blocks of the row, and of its neighbor.
PLACES = (((0, 1, 2), (3, 4, 5)), ((7, 0, 5), (2, 6, 1)), ((3, 6, 1), (0, 7, 4)))


@cache
def model_of(name: str) -> tuple[nn.Module, ModelSpec]:
    model = graph_model(name, torch.float32)
    assert CacheNeeds.read_code(model).by_itself
    return model, inspect_model(model)


def answers(
    runner: GraphRunner, pieces: Sequence[int], *, beside: bool = True, last: int | None = None
) -> list[Tensor]:
    """Logits of row 1 after its prompt and of each token behind it, which another prompt's chunks and then its tokens stand beside.

    Args:
        last: the third block of the row, which it gets when it needs it.
    """
    logits, done = [prefill_pieces(runner, 1, PROMPT, pieces)], 0
    for index in range(10):
        count = min(20, len(OTHER) - done) if beside else 0
        chunks = [PromptPiece(2, OTHER[done : done + count])] if count else []
        tokens = {1: 3 + index} | ({} if chunks or not beside else {2: 5})
        if last is not None and index == 6:
            runner.assign_blocks(1, 2, (last,))
        output = runner.run_step(chunks, decode_rows(runner, tokens))
        assert output.decode_logits is not None
        logits.append(as_tensor(output.decode_logits[1]))
        done += count
    return logits


def in_blocks(runner: GraphRunner, spec: ModelSpec, case: int, *, beside: bool = True) -> list[Tensor]:
    runner.reset_slots()
    for state in state_specs(runner.config, spec):
        write_state(runner.executable, state.name, torch.full(state.shape, torch.nan))
    own, others = PLACES[case]
    runner.assign_blocks(1, 0, own[:2])
    runner.assign_blocks(2, 0, others)
    return answers(runner, PIECES[case], beside=beside, last=own[2])


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


with_models = pytest.mark.parametrize(
    "name", [*MODELS, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)]
)


@with_models
def test_blocks_have_the_bits_of_slots_where_a_model_attends_by_itself(name: str) -> None:
    model, spec = model_of(name)
    slots, runner = (eager_runner(model, tiny_config(**sizes)) for sizes in (SLOTS, BLOCKS))
    expected = answers(slots, PIECES[0])
    for case in range(len(PLACES)):
        assert same(in_blocks(runner, spec, case), expected)
    slots.reset_slots()
    assert same(in_blocks(runner, spec, 1, beside=False), answers(slots, PIECES[0], beside=False))


def test_a_block_of_two_rows_serves_both_where_a_model_attends_by_itself() -> None:
    model, spec = model_of("codegen")
    runner = eager_runner(model, tiny_config(**BLOCKS))
    expected = in_blocks(runner, spec, 0, beside=False)
    runner.reset_slots()
    runner.assign_blocks(1, 0, (4, 6, 1))
    prefill_pieces(runner, 1, PROMPT, PIECES[0])
    runner.assign_blocks(2, 0, (4, 5))
    runner.resume_slot(2, 64)
    prefill_pieces(runner, 2, PROMPT[64:], [58])
    for index in range(10):
        output = runner.run_step([], decode_rows(runner, {1: 3 + index, 2: 3 + index}))
        assert output.decode_logits is not None
        assert torch.equal(as_tensor(output.decode_logits[1]), expected[index + 1])
        assert torch.allclose(as_tensor(output.decode_logits[2]), expected[index + 1], atol=1e-5)
        if index == 5:
            runner.assign_blocks(2, 2, (3,))


@pytest.mark.slow
@pytest.mark.full
def test_the_cpu_target_gathers_them_too_and_the_export_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, spec = model_of("codegen")
    model.save_pretrained(tmp_path / "checkpoint")
    slots = export_tiny(tmp_path / "checkpoint", tmp_path / "slots", **SLOTS, target="cpu")
    assert "gather" not in caplog.text
    with caplog.at_level(logging.WARNING):
        blocks = export_tiny(tmp_path / "checkpoint", tmp_path / "blocks", **BLOCKS, target="cpu")
    assert (
        f"{len(spec.states_of(KeyValueState))} layers of CodeGenForCausalLM gather their blocks in each step"
        in caplog.text
    )
    expected = answers(artifact_runner(slots), PIECES[0])
    runner = artifact_runner(blocks)
    for case in range(len(PLACES)):
        assert same(in_blocks(runner, spec, case), expected)


def test_blocks_that_would_attend_where_they_lie_are_refused_for_code_that_needs_slots() -> None:
    words = "CodeGenForCausalLM attends by code of its own, .*target='hlo' .*leave out kv_block_size=64"
    with pytest.raises(ValueError, match=words):
        check_states(*model_of("codegen"), tiny_config(**BLOCKS, target="hlo"))
