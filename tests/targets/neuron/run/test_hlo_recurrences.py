# SPDX-License-Identifier: Apache-2.0
"""Recurrences on the hlo target: linted, certified, with the eager target's logits, and the same bits at any cut and in any slot.

And layers that select keys, in blocks, in pools behind a recurrence, or compressed: these have the first of the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import compressing
import numpy as np
import pytest
import torch
from helpers import (
    artifact_runner,
    as_tensor,
    decode_rows,
    decode_tokens,
    eager_runner,
    export_tiny,
    generate,
    load_model,
    random_tokens,
    read_state,
    tiny_config,
    write_state,
)
from neuron_fixtures import certificate_of, mixed_runner
from recurrent import CONFIGS, model
from selecting import make_checkpoint
from torch import Tensor

from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.core import PromptPiece
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.state_specs import state_specs
from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.graphs.io import read_graph_io
from optimum_neuron.targets.neuron.lint.lint import lint


# Of a recurrence; a step of these sizes has two chunk rows of as many tokens, in windows of two blocks each.
BLOCK = 8
PROMPT = random_tokens(21, seed=2)
NEIGHBOR = random_tokens(40, seed=3)
AFTER = (7, 11, 5)
REFUSED = {
    "while", "conditional", "call", "custom-call", "sort", "topk", "reduce-window", "dynamic-slice", "dynamic-update-slice",
}  # fmt: skip
# Of a layer with a recurrence, in a graph of these sizes.
LAYER_INSTRUCTIONS = 1_700
# The others by the full profile.
QUICK = "gated delta"
kinds = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == QUICK else [pytest.mark.full]) for kind in CONFIGS]
)


# Model types with layers that select keys, and some of what their slots keep; none has a place in the quick profile.
SELECTING = {"deepseek_v4": {"buffer", "group"}, "minimax_m3_vl_text": {"index"}, "qwen4_exp_text": {"index", "state"}}
all_kinds = pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=[] if kind == QUICK else [pytest.mark.full]) for kind in CONFIGS),
        *(pytest.param(kind, marks=[pytest.mark.full, pytest.mark.slow]) for kind in SELECTING),
    ],
)


@pytest.fixture(scope="module")
def artifact(
    recurrent_artifact: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Artifact]:
    """By kind of recurrence, or by model type, each with a certificate."""
    made: dict[str, Artifact] = {}

    def export(kind: str) -> Artifact:
        if kind not in SELECTING:
            return Artifact.open(recurrent_artifact(kind))
        if kind not in made:
            folder = tmp_path_factory.mktemp("selected") / kind
            if kind == "deepseek_v4":
                compressing.reference().save_pretrained(folder / "checkpoint")
            else:
                make_checkpoint(kind, folder / "checkpoint")
            options: dict[str, Any] = {"target": "hlo", "mixed_step": False, "certificate": True}
            made[kind] = Artifact.open(export_tiny(folder / "checkpoint", folder / "out", **options))
        return made[kind]

    return export


def answer(runner: GraphRunner, slot: int, pieces: Sequence[int], neighbor: int | None = None) -> list[Tensor]:
    """Logits behind the prompt, behind tokens that follow one by one, and behind a chunk of more; a neighbor decodes meanwhile."""
    others = iter(NEIGHBOR[BLOCK:])
    if neighbor is not None:
        runner.run_step([PromptPiece(neighbor, NEIGHBOR[:BLOCK])])

    def take_in(tokens: np.ndarray) -> Tensor:
        chunks = [PromptPiece(slot, tokens)]
        if neighbor is None:
            output = runner.run_step(chunks)
        else:
            output = runner.run_step(chunks, decode_rows(runner, {neighbor: int(next(others))}))
        assert output.chunk_logits is not None
        return as_tensor(output.chunk_logits[0])

    *_, last = (take_in(tokens) for tokens in np.split(PROMPT, np.cumsum(pieces)[:-1]))
    logits = [last]
    for token in AFTER:
        fed = {slot: token} if neighbor is None else {slot: token, neighbor: int(next(others))}
        logits.append(decode_tokens(runner, fed)[1][slot])
    return [*logits, take_in(NEIGHBOR[:11])]


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


# A weight that DeepSeek-V4's code takes as a matrix of each group.
BY_GROUP = "self_attn.o_a_proj.weight is transposed"


@all_kinds
def test_graphs_are_linted_certified_and_give_the_tokens_of_the_eager_target(
    kind: str, artifact: Callable[[str], Artifact]
) -> None:
    made = artifact(kind)
    kept = {each.name: each for each in state_specs(made.config, made.model)}
    assert {each.dtype for name, each in kept.items() if "state_" in name or "anchor_" in name} <= {"float32"}
    for graph in made.graphs:
        path = made.graph_file(f"{graph.name}.hlo")
        io, module = read_graph_io(path), hlo.parse(path.read_bytes())
        found = [str(each) for each in lint(graph.name, path.read_bytes(), io, "hlo")]  # by the rules of all targets
        assert [each for each in found if BY_GROUP not in each] == []
        assert {each.alias_of for each in io.outputs if each.alias_of} >= kept.keys()
        if kind in CONFIGS:
            instructions = [each for _, each in hlo.instructions(module)]
            assert not REFUSED & {each.opcode for each in instructions}
            first = [each for each in instructions if ".layers.0." in hlo.module_path(each)]
            assert LAYER_INSTRUCTIONS / 5 < len(first) <= LAYER_INSTRUCTIONS
    found = {each.subject for each in certificate_of(made.path).comparisons}
    parts = {name.removeprefix("kv_cache.").split("_")[0] for name in kept}
    assert SELECTING.get(kind, {"state", "anchor", "tail", "scanned"}) <= parts
    assert {f"states: {name}" for name in parts} <= found
    assert all(any(subject.startswith(graph.name) for subject in found) for graph in made.graphs)
    if kind in SELECTING:
        eager = eager_runner(load_model(made.path.parent / "checkpoint"), tiny_config(mixed_step=False))
        runners = [artifact_runner(made.path)]
    else:
        eager = eager_runner(model(kind), tiny_config())
        runners = [artifact_runner(made.path), mixed_runner(made.path)]
    expected, logits = generate(eager, PROMPT, 12)
    for runner in runners:
        found, found_logits = generate(runner, PROMPT, 12)
        assert found == expected
        assert (logits - found_logits).abs().max() < 1e-3 * logits.std()


# At the boundaries of blocks and a token off them; more than 8 take two rows of a step.
CUTS = ([16, 5], [1, 15, 5], [7, 1, 13], [9, 12], [8, 8, 4, 1])


@kinds
def test_no_cut_slot_neighbor_or_earlier_request_changes_a_bit(kind: str, artifact: Callable[[str], Artifact]) -> None:
    runner = mixed_runner(artifact(kind).path)
    expected = answer(runner, 1, CUTS[0])
    for number, cuts in enumerate(CUTS):
        runner.reset_slots()
        slot = number % 3
        assert same(answer(runner, slot, cuts, (slot + 1) % 3 if number % 2 else None), expected), cuts
    # NaN in all that slots keep, as a request leaves it that had one; and what a slot keeps is nobody else's.
    runner.reset_slots()
    left = {}
    for state in state_specs(runner.config, artifact(kind).model):
        value = torch.nan if state.dtype == "float32" else BLOCK
        left[state.name] = torch.full(state.shape, value, dtype=getattr(torch, state.dtype))
        write_state(runner.executable, state.name, left[state.name])
    assert same(answer(runner, 1, CUTS[2]), expected)
    for name, before in left.items():
        torch.testing.assert_close(read_state(runner.executable, name)[0], before[0], rtol=0, atol=0, equal_nan=True)
