# SPDX-License-Identifier: Apache-2.0
"""Recurrences on the hlo target: linted, certified, with the eager target's logits, and the same bits at any cut and in any slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    artifact_runner,
    as_tensor,
    decode_rows,
    decode_tokens,
    eager_runner,
    generate,
    random_tokens,
    read_state,
    tiny_config,
    write_state,
)
from neuron_fixtures import certificate_of
from recurrent import CONFIGS, model
from torch import Tensor

from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.config import HLO_TARGETS
from optimum_neuron.core import PromptPiece
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.state_specs import state_specs
from optimum_neuron.targets import get_target
from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.graphs.io import read_graph_io
from optimum_neuron.targets.neuron.lint.lint import lint


# Of a recurrence; a step of these sizes has two chunk rows of as many tokens, in windows of two blocks each.
BLOCK = 8
PROMPT = random_tokens(21, seed=2)
NEIGHBOR = random_tokens(40, seed=3)
AFTER = (7, 11, 5)
REFUSED = {
    "while",
    "conditional",
    "call",
    "custom-call",
    "sort",
    "topk",
    "reduce-window",
    "dynamic-slice",
    "dynamic-update-slice",
}
# Of a layer with a recurrence, in a graph of these sizes.
LAYER_INSTRUCTIONS = 1_700
# The others by the full profile.
QUICK = "gated delta"
kinds = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == QUICK else [pytest.mark.full]) for kind in CONFIGS]
)


@pytest.fixture
def artifact(recurrent_artifact: Callable[[str], Path]) -> Callable[[str], Artifact]:
    """By kind of recurrence."""
    return lambda kind: Artifact.open(recurrent_artifact(kind))


def one_graph(artifact: Artifact) -> GraphRunner:
    """Every step in the mixed graph, so that all bits of a token come from the same computation."""
    executable = get_target("hlo").load(artifact, trust_native_code=True, trust_remote_code=False)
    return GraphRunner(executable, artifact.config, artifact.graphs, artifact.model, deterministic=True)


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


@kinds
def test_graphs_are_what_compilers_take(kind: str, artifact: Callable[[str], Artifact]) -> None:
    made = artifact(kind)
    kept = {each.name: each for each in state_specs(made.config, made.model)}
    assert {each.dtype for name, each in kept.items() if "state_" in name or "anchor_" in name} == {"float32"}
    for graph in made.graphs:
        path = made.graph_file(f"{graph.name}.hlo")
        io, module = read_graph_io(path), hlo.parse(path.read_bytes())
        for target in HLO_TARGETS:
            assert not lint(graph.name, path.read_bytes(), io, target)
        instructions = [each for _, each in hlo.instructions(module)]
        assert not REFUSED & {each.opcode for each in instructions}
        assert {each.alias_of for each in io.outputs if each.alias_of} >= kept.keys()
        first = [each for each in instructions if ".layers.0." in hlo.module_path(each)]
        assert LAYER_INSTRUCTIONS / 5 < len(first) <= LAYER_INSTRUCTIONS


@kinds
def test_a_certificate_tells_of_all_that_slots_keep(kind: str, artifact: Callable[[str], Artifact]) -> None:
    made = artifact(kind)
    found = {each.subject for each in certificate_of(made.path).comparisons}
    kept = {each.name.removeprefix("kv_cache.").split("_")[0] for each in state_specs(made.config, made.model)}
    assert {"state", "anchor", "tail", "scanned"} <= kept
    assert {f"states: {name}" for name in kept} <= found
    for graph in made.graphs:
        assert any(subject.startswith(graph.name) for subject in found)


@kinds
def test_tokens_are_those_of_the_eager_target(kind: str, artifact: Callable[[str], Artifact]) -> None:
    expected, logits = generate(eager_runner(model(kind), tiny_config()), PROMPT, 12)
    for runner in (artifact_runner(artifact(kind).path), one_graph(artifact(kind))):
        found, found_logits = generate(runner, PROMPT, 12)
        assert found == expected
        assert (logits - found_logits).abs().max() < 1e-3 * logits.std()


# At the boundaries of blocks and a token off them; more than 8 take two rows of a step.
CUTS = ([16, 5], [1, 15, 5], [7, 1, 13], [9, 12], [8, 8, 4, 1])


@kinds
def test_no_cut_slot_or_neighbor_changes_a_bit(kind: str, artifact: Callable[[str], Artifact]) -> None:
    runner = one_graph(artifact(kind))
    expected = answer(runner, 1, CUTS[0])
    for number, cuts in enumerate(CUTS):
        runner.reset_slots()
        slot = number % 3
        assert same(answer(runner, slot, cuts, (slot + 1) % 3 if number % 2 else None), expected), cuts


@kinds
def test_what_an_earlier_request_left_has_no_effect(kind: str, artifact: Callable[[str], Artifact]) -> None:
    """NaN in all that slots keep, as a request leaves it that had one; and what a slot keeps is nobody else's."""
    runner = one_graph(artifact(kind))
    expected = answer(runner, 1, CUTS[0])
    runner.reset_slots()
    states = state_specs(runner.config, artifact(kind).model)
    for state in states:
        filled = torch.full(
            state.shape, torch.nan if state.dtype == "float32" else BLOCK, dtype=getattr(torch, state.dtype)
        )
        write_state(runner.executable, state.name, filled)
    assert same(answer(runner, 1, CUTS[2]), expected)
    for state in states:
        left = read_state(runner.executable, state.name)[0]
        assert bool(left.isnan().all() if state.dtype == "float32" else (left == BLOCK).all()), state.name
