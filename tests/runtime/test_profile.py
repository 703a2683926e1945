# SPDX-License-Identifier: Apache-2.0
"""A profile tells every step and every run of a graph, changes no token, and costs nothing where it is not asked for."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers import export_tiny, random_tokens, read_state, write_state
from optimum.commands import optimum_cli
from traces import Told, lies_in, read_trace

from optimum_neuron import NeuronModelForCausalLM, Profile
from optimum_neuron.runtime import timing
from optimum_neuron.runtime.profile import TRACE_NAME
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.runtime.timing import TracedExecutable
from optimum_neuron.targets.cpu.executable import CpuExecutable
from optimum_neuron.targets.eager import EagerExecutable


PROMPTS = [random_tokens(length, seed=length).tolist() for length in (5, 21, 30, 13)]
PROMPTS.append([*PROMPTS[2], 7])  # starts like another one


@pytest.fixture(scope="module")
def eager_artifact(sharp_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_tiny(sharp_checkpoints["llama"], tmp_path_factory.mktemp("profiled") / "eager")


@pytest.fixture(params=["eager", "cpu"])
def artifact(request: pytest.FixtureRequest, eager_artifact: Path, cpu_artifact: Callable[[str], Path]) -> Path:
    return eager_artifact if request.param == "eager" else cpu_artifact("llama")


def answers(model: NeuronModelForCausalLM) -> tuple[Any, Any]:
    """Greedy through the engine, sampled through generate."""
    greedy = [output.generated_tokens for output in model.generate_batch(PROMPTS, max_new_tokens=6).values()]
    torch.manual_seed(3)
    return greedy, model.generate(torch.tensor([PROMPTS[1]]), max_new_tokens=12, do_sample=True, top_k=9).tolist()


def profiled(artifact: Path, folder: Path) -> tuple[Any, Told, GraphRunner]:
    """Answers with a profile, the profile, and what ran."""
    with Profile(folder) as profile:
        model = NeuronModelForCausalLM.from_pretrained(artifact, profile=profile)
        found = answers(model)
    return found, read_trace(folder), model.runner


def test_a_trace_has_every_run_and_step_and_no_token_is_another(artifact: Path, tmp_path: Path) -> None:
    found, told, runner = profiled(artifact, tmp_path / "new" / "profile")
    assert found == answers(NeuronModelForCausalLM.from_pretrained(artifact))
    graphs, steps = Counter(told.names("graphs")), told.tracks["steps"]
    kinds = Counter(told.names("steps"))
    assert graphs.pop("copy_slot") == kinds.pop("copy prefix") > 0
    assert kinds.pop("warm-up") == 1
    assert graphs == runner.graph_calls + Counter(graph.name for graph in runner.family)
    assert set(kinds) == {"prefill chunk", "decode", "mixed"}
    assert sum(kinds.values()) == sum(runner.graph_calls.values()) == len(told.counters)
    assert all(lies_in(event, steps) for event in told.tracks["graphs"])
    assert told.facts == {"artifact": str(artifact), "target": artifact.name if artifact.name == "eager" else "cpu"}
    assert [path.name for path in (tmp_path / "new" / "profile").iterdir()] == [TRACE_NAME]


def test_steps_tell_their_slots_rows_and_tokens_and_states_pass_through(eager_artifact: Path, tmp_path: Path) -> None:
    with Profile(tmp_path / "profile") as profile:
        model = NeuronModelForCausalLM.from_pretrained(eager_artifact, profile=profile)
        model.generate(torch.tensor([PROMPTS[1]] * 2), max_new_tokens=3, do_sample=False)
    told = read_trace(tmp_path / "profile")
    chunks = [event["args"] for event in told.tracks["steps"] if event["name"] == "prefill chunk"]
    decodes = [event["args"] for event in told.tracks["steps"] if event["name"] == "decode"]
    assert sum(each["tokens"] for each in chunks) == 2 * len(PROMPTS[1])
    assert {slot for each in chunks for slot in each["chunk_slots"]} == {0, 1}
    assert decodes == [{"decode_slots": [0, 1], "chunk_slots": [], "rows": 2, "tokens": 2}] * 2
    assert [event["args"] for event in told.counters][-1] == {"decode": 2, "chunk": 0}
    executable = model.runner.executable
    assert isinstance(executable, TracedExecutable)
    state = torch.full_like(read_state(executable, "kv_cache.key_0"), 3.0)
    write_state(executable, "kv_cache.key_0", state)
    assert torch.equal(read_state(executable, "kv_cache.key_0"), state)


def test_the_first_runs_of_a_plan_are_told_by_operator(
    cpu_artifact: Callable[[str], Path], eager_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "OPERATOR_RUNS", 2)
    _, told, runner = profiled(cpu_artifact("llama"), tmp_path / "cpu")
    operators, graphs = told.tracks["operators"], told.tracks["graphs"]
    early = [event for event in graphs if event["args"].get("run", 3) <= 2]
    assert min(runner.graph_calls.values()) > 2
    assert all(lies_in(event, early) for event in operators)
    assert all(any(lies_in(operator, [event]) for operator in operators) for event in early)
    kinds = {name.split()[0] for name in told.names("operators")}
    assert {"Linears", "Attend", "WriteCache", "Map", "Select"} <= kinds
    assert "Linears model.model.layers.1.self_attn.q_proj.weight + 2" in told.names("operators")
    _, plain, _ = profiled(eager_artifact, tmp_path / "eager")
    assert set(plain.tracks) == {"steps", "graphs"}


def test_a_model_that_is_not_profiled_has_nothing_of_it(
    eager_artifact: Path, cpu_artifact: Callable[[str], Path]
) -> None:
    for path, kind in ((eager_artifact, EagerExecutable), (cpu_artifact("llama"), CpuExecutable)):
        runner = NeuronModelForCausalLM.from_pretrained(path).runner
        assert type(runner) is GraphRunner and type(runner.executable) is kind


def test_what_ran_before_a_failure_is_told_and_nothing_leaves_nothing(
    eager_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyError), Profile(tmp_path / "profile"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    runs, failure = iter([EagerExecutable.run] * 3), Mock(side_effect=RuntimeError("the device is gone"))
    monkeypatch.setattr(EagerExecutable, "run", lambda *arguments: next(runs, failure)(*arguments))
    with pytest.raises(RuntimeError, match="the device is gone"):
        profiled(eager_artifact, tmp_path / "profile")
    assert len(read_trace(tmp_path / "profile").names("graphs")) == 3


def generate(artifact: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["optimum-cli", "neuron", "generate", str(artifact), "--prompt", "Hi", "--max-new-tokens", "3"]
    monkeypatch.setattr(sys, "argv", [*command, "--profile", str(folder)])
    optimum_cli.main()


def test_the_command_writes_a_profile(
    eager_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(eager_artifact, tmp_path / "profile", monkeypatch)
    assert read_trace(tmp_path / "profile").names("steps")[0] == "prefill chunk"
    assert f"profile in {tmp_path / 'profile'}: trace.json for ui.perfetto.dev\n" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["folder", "file", "link", "file/profile", "locked/profile"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(
    place: str, eager_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "locked").mkdir(mode=0o500)
    if place.startswith("locked") and os.access(tmp_path / "locked", os.W_OK):
        return  # nothing is locked for root
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(NeuronModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(SystemExit) as ended:
        generate(eager_artifact, tmp_path / place, monkeypatch)
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert ended.value.code == 1 and captured.out == ""
    assert str(tmp_path / place) in line and "name a" in line
    assert sorted(tmp_path.rglob("*")) == before
