# SPDX-License-Identifier: Apache-2.0
"""Prompts that go on behind a snapshot of state on the hlo target: the bits of who computes the whole prompt."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    artifact_runner,
    decode_tokens,
    eager_runner,
    generate,
    prefill_pieces,
    random_tokens,
    read_state,
    reuse_prefix,
    tiny_config,
    write_state,
)
from lowered_again import Case, places
from neuron_fixtures import mixed_runner
from recurrent import SERVED, model
from torch import Tensor
from transformers import LogitsProcessorList

from optimum_neuron.artifact.artifact import MANIFEST_NAME, Artifact
from optimum_neuron.core import Request
from optimum_neuron.engine.engine import Engine
from optimum_neuron.engine.policy import SchedulerOptions
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.state_specs import KEPT, kept_state_specs, slot_state_specs
from optimum_neuron.targets.neuron.graphs.io import COPY_SLOT, KEEP_STATE, RESTORE_STATE, read_graph_io
from optimum_neuron.targets.neuron.graphs.state_graphs import copy_graphs
from optimum_neuron.targets.neuron.lint.lint import lint
from optimum_neuron.targets.neuron.lowering.lower import RowCopy, lower_state_graph
from optimum_neuron.tools.certify.certify import expect_type
from optimum_neuron.tools.certify.host_ranks import LoweredModule
from optimum_neuron.tools.certify.setup import Trial, make_setup
from optimum_neuron.tools.check.step_checks import CheckError, check_kept_state, check_slot_copy


CHUNK, PLACE = 8, 1
TEXT = random_tokens(40, seed=11)
QUICK = "gated delta"
kinds = pytest.mark.parametrize(
    "kind", [QUICK, *(pytest.param(kind, marks=pytest.mark.full) for kind in ("state space", *SERVED))]
)


def overwrite(runner: GraphRunner) -> None:
    """NaN, and indices beyond all, in all rows of all states."""
    for name in runner.executable._states:
        state = read_state(runner.executable, name)
        write_state(runner.executable, name, state.fill_(torch.nan if state.is_floating_point() else CHUNK))


def followed(runner: GraphRunner, slot: int, logits: Tensor) -> Tensor:
    return torch.stack([logits, *(decode_tokens(runner, {slot: token})[1][slot] for token in (5, 6, 7))])


@kinds
def test_a_slot_goes_on_behind_a_snapshot_at_any_place(kind: str, recurrent_artifact: Callable[[str], Path]) -> None:
    """NaN in slots, and in places before they are written, has no effect; places that nobody writes to keep theirs."""
    runner = mixed_runner(recurrent_artifact(kind))
    for length in (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3):
        runner.reset_slots()
        overwrite(runner)
        prompt = np.concatenate([TEXT[:length], random_tokens(11, seed=length)])
        pieces = [CHUNK] * (len(prompt) // CHUNK) + [len(prompt) % CHUNK] * (len(prompt) % CHUNK > 0)
        expected = followed(runner, 2, prefill_pieces(runner, 2, prompt, pieces))
        assert expected.isfinite().all()
        prefill_pieces(runner, 0, TEXT[:length], [min(CHUNK, length - at) for at in range(0, length, CHUNK)])
        runner.keep_state(0, PLACE)
        prefill_pieces(runner, 0, TEXT[length : length + 5], [5])
        for slot in (1, 0):  # a copy of what went on meanwhile, and in its place
            reuse_prefix(runner, slot, 0, length, PLACE)
            logits = prefill_pieces(runner, slot, prompt[length:], [3, CHUNK])
            assert torch.equal(followed(runner, slot, logits), expected)
        for name in runner.executable._states:
            if name.startswith(KEPT) and not name.endswith("scanned"):
                assert read_state(runner.executable, name)[[0, 2]].isnan().all()


def serve(runner: GraphRunner, prompt: np.ndarray, engine: Engine) -> tuple[int, list[int], Tensor]:
    """How many tokens of a prompt were not computed, those that follow it, and the logits of these."""
    logits: list[Tensor] = []

    def note(ids: Tensor, scores: Tensor) -> Tensor:
        logits.append(scores[0].clone())
        return scores

    before = engine.statistics.prefix_hit_tokens
    noted = LogitsProcessorList([note])
    engine.add_request(Request(request_id="a", prompt_token_ids=prompt, max_new_tokens=4, processors=noted))
    tokens = [event.token_id for event in engine.run_requests()]
    return engine.statistics.prefix_hit_tokens - before, tokens, torch.stack(logits)


@kinds
def test_a_hit_in_the_engine_has_the_tokens_and_bits_of_a_miss(
    kind: str, recurrent_artifact: Callable[[str], Path]
) -> None:
    """The second prompt is cut where it parts from the first, and the third goes on there, in a slot that held NaN."""
    runner = mixed_runner(recurrent_artifact(kind))
    size = Artifact.open(recurrent_artifact(kind)).model.vocab_size
    engine, eager = Engine(runner, vocab_size=size), eager_runner(model(kind), tiny_config())
    served = []
    for number, has in enumerate((0, 0, 31, 31)):
        prompt = np.concatenate([TEXT[:31], random_tokens(20 - number, seed=number)])
        found, tokens, logits = serve(runner, prompt, engine)
        assert found == has and tokens == generate(eager, prompt, 4)[0]
        served.append((prompt, logits))
    overwrite(runner)
    for prompt, logits in served:
        alone = Engine(runner, SchedulerOptions(prefix_reuse=False), vocab_size=size)
        assert torch.equal(serve(runner, prompt, alone)[2], logits)


@kinds
def test_graphs_that_copy_state_are_what_compilers_take(kind: str, recurrent_artifact: Callable[[str], Path]) -> None:
    """Each updates in place one of a state and its snapshots, and step graphs know nothing of snapshots."""
    artifact = Artifact.open(recurrent_artifact(kind))
    states = {each.name for each in slot_state_specs(artifact.config, artifact.model)}
    places = {each.name for each in kept_state_specs(artifact.config, artifact.model)}
    for name, read, updated in ((KEEP_STATE, states, places), (RESTORE_STATE, places, states)):
        path = artifact.graph_file(f"{name}.hlo")
        io = read_graph_io(path)
        assert set(io.names("state")) == read | updated
        assert {each.alias_of for each in io.outputs} == updated
        assert lint(name, path.read_bytes(), io, "hlo") == []
    for graph in artifact.graphs:
        assert not places & set(read_graph_io(artifact.graph_file(f"{graph.name}.hlo")).names("state"))


def test_to_run_all_graphs_for_the_first_time_changes_no_snapshot(recurrent_artifact: Callable[[str], Path]) -> None:
    runner = mixed_runner(recurrent_artifact(QUICK))
    prefill_pieces(runner, 0, TEXT[:5], [5])
    runner.keep_state(0, 0)
    prefill_pieces(runner, 0, TEXT[5:9], [4])
    names = [each.name for each in slot_state_specs(runner.config, Artifact.open(recurrent_artifact(QUICK)).model)]
    before = {name: read_state(runner.executable, name) for each in names for name in (each, KEPT + each)}
    runner.warm_up()
    for name, state in before.items():
        live = state if name.startswith(KEPT) else state[:-1]
        assert torch.equal(read_state(runner.executable, name)[: len(live)], live), name


@pytest.mark.parametrize("broken", ["keep_state", "restore_state"])
def test_a_check_of_the_artifact_tells_where_state_is_not_copied(
    broken: str, recurrent_artifact: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recurrent_artifact(QUICK)
    artifact, runner = Artifact.open(path), artifact_runner(path)
    with monkeypatch.context() as patch:
        patch.setattr(runner.executable, broken, lambda *_: None)
        with pytest.raises(CheckError, match=r"kv_cache\.\w+ of slot 0 is not what copy 2 was taken of"):
            check_kept_state(artifact, runner)
    assert check_kept_state(artifact, runner) == {"states": 5, "places": 3}
    assert check_slot_copy(artifact, runner) == {"states": 2}


def test_an_artifact_of_before_keeps_no_snapshots(recurrent_artifact: Callable[[str], Path], tmp_path: Path) -> None:
    """It has no graph that copies, and its config names no snapshots."""
    path = tmp_path / "before"
    shutil.copytree(recurrent_artifact(QUICK), path)
    manifest = json.loads((path / MANIFEST_NAME).read_text())
    del manifest["config"]["state_snapshots"], manifest["config"]["state_snapshot_interval"]
    for name in (COPY_SLOT, KEEP_STATE, RESTORE_STATE):
        for file in (path / "graphs").glob(f"{name}.*"):
            del manifest["files"][f"graphs/{file.name}"]
            file.unlink()
    (path / MANIFEST_NAME).write_text(json.dumps(manifest))
    runner, eager = artifact_runner(path), eager_runner(model(QUICK), tiny_config())
    assert not len(runner.kept.lengths) and not [name for name in runner.executable._states if name.startswith(KEPT)]
    assert generate(runner, TEXT, 4)[0] == generate(eager, TEXT, 4)[0]
    with pytest.raises(ValueError, match="snapshot 0 does not exist: there are 0"):
        runner.keep_state(0, 0)


DEFECTS: dict[str, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    "another row": lambda source, destination, length: ((source + 1) % 3, destination, length),
    "another place": lambda source, destination, length: (source, destination - 1, length),
    "idle runs copy": lambda source, destination, length: (source, destination, length + 1),
}


@pytest.mark.parametrize("graph", [KEEP_STATE, RESTORE_STATE])
def test_a_graph_that_copies_wrongly_is_found(
    graph: str, recurrent_artifact: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact, forward = Artifact.open(recurrent_artifact(QUICK)), RowCopy.forward
    config, layers = artifact.config, artifact.model.depth
    trial = Trial(artifact.path, config, config, layers, layers)
    setup = make_setup(artifact.path, trial, artifact.model, artifact.tied_weights, trust_remote_code=False)
    scales, expected = expect_type(model(QUICK), setup, "float32", {}, trust_remote_code=False)
    case, copies = Case(setup, expected, scales), {each.name: each for each in copy_graphs(config, artifact.model)}
    assert places(case.compare(setup.modules)) == []
    for name, defect in DEFECTS.items():
        monkeypatch.setattr(RowCopy, "forward", lambda self, *inputs, defect=defect: forward(self, *defect(*inputs)))
        lowered = lower_state_graph(copies[graph])
        assert places(case.compare({**setup.modules, graph: LoweredModule(lowered.hlo, lowered.io)})), name
