# SPDX-License-Identifier: Apache-2.0
"""`optimum-cli neuron tune`, whole: for a device by its config alone, for this CPU by graphs that are measured, and for an artifact."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import Artifacts, Cli

from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.config import NeuronConfig
from optimum_neuron.step.spec import graph_specs
from optimum_neuron.tools.tune import measure as measuring
from optimum_neuron.tools.tune.candidates import Candidate
from optimum_neuron.tools.tune.machines import CpuMachine, graph_minutes
from optimum_neuron.tools.tune.search import search_sizes
from optimum_neuron.tools.tune.simulate import CpuClock
from optimum_neuron.tools.tune.slo import Slo
from optimum_neuron.tools.tune.trace import read_trace


Run = Callable[..., tuple[int, str, dict[str, Any]]]
TRACE = "arrival,prompt_tokens,new_tokens\n0,20,5\n0.01,30,8\n0.5,7,3\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.csv"
    file.write_text(TRACE)
    return file


@pytest.fixture
def run(trace: Path, tmp_path: Path, cli: Cli) -> Run:
    """Run the command; return its exit code, what it prints and what it writes."""
    file = tmp_path / "found.json"

    def command(*words: str) -> tuple[int, str, dict[str, Any]]:
        code, *shown = cli("neuron", "tune", "--trace", trace, "--json", file, *words)
        return code, "".join(shown), json.loads(file.read_text()) if file.exists() else {}

    return command


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """As few runs as there can be: times do not matter."""
    for name, value in {"ROUNDS": 1, "LEAST_RUNS": 1, "MOST_RUNS": 1, "PAUSES": 1, "PAUSE_S": 0.0}.items():
        monkeypatch.setattr(measuring, name, value)


def test_a_device_is_tuned_by_its_config_alone(run: Run, tiny_checkpoint: Path) -> None:
    words = ("--model", str(tiny_checkpoint), "--target", "trn2", "--search", "batch=2,4", "chunk=16,64")
    code, shown, found = run(*words, "--slo", "ttft=10s,itl=1s", "--compile-budget", "1h")
    assert code == 0 and found["meets"]
    assert found["step_times"] == "predicted" and "not measured on a device" in " ".join(shown.split())
    best = NeuronConfig.from_dict(found["candidates"][0]["config"])
    assert best.target == "trn2" and best.sequence_length == 256
    assert found["candidates"][0]["compile_minutes"] == sum(graph_minutes(graph, None) for graph in graph_specs(best))
    for command in found["commands"]:
        assert command in shown


def test_what_is_missed_is_told_with_an_exit_code_of_its_own(run: Run, tiny_checkpoint: Path) -> None:
    words = ("--model", str(tiny_checkpoint), "--target", "trn2", "--search", "batch=2", "chunk=16", "ctx=1")
    code, shown, found = run(*words, "--slo", "itl=1ms,ttft=0.001ms")
    told = " ".join(shown.split())
    assert code == 3 and not found["meets"] and found["commands"]
    assert "Nothing meets all limits. The nearest: 2 rows" in told and "for the TTFT p99 of 0.001 ms" in told
    assert "times as much; try more replicas, a larger chunk or more rows." in told


def test_the_command_exports_what_was_found(
    run: Run, cli: Cli, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its words are taken by the export itself, up to the config."""
    words = ("--model", str(tiny_checkpoint), "--target", "trn2", "--dtype", "bfloat16", "--sequence-length", "256")
    _, _, found = run(*words, "--search", "batch=4", "chunk=32", "ctx=2", "buckets=64", "policy=alternate")
    taken: list[NeuronConfig] = []

    def export(model: str, output: Path, *, config: NeuronConfig, **options: Any) -> None:
        taken.append(config)
        raise ValueError("as far as it goes")

    monkeypatch.setattr("optimum_neuron.export.recipe.export_model", export)
    assert cli(*found["commands"][0].split()[1:])[0] == 1
    assert taken == [NeuronConfig.from_dict(found["candidates"][0]["config"])]
    assert taken[0].context_buckets == (64, 256) and not taken[0].mixed_step


@pytest.mark.usefixtures("quick")
def test_this_cpu_is_measured_once_for_all_candidates_of_an_artifact(cpu_artifact: Artifacts, trace: Path) -> None:
    """The artifact that all tests share stands for the export of each group of candidates."""
    exported: list[NeuronConfig] = []

    def export(path: Path, config: NeuronConfig) -> None:
        exported.append(config)
        path.symlink_to(cpu_artifact("llama"))

    config = Artifact.open(cpu_artifact("llama")).config
    candidates = [Candidate(config)]
    machine = CpuMachine.from_candidates(export, candidates)
    assert [each.prefill_chunk_size for each in exported] == [config.prefill_chunk_size]
    found = search_sizes(candidates, machine, read_trace(trace), Slo.parse_limits("ttft=60s"))
    times = machine.step_clock(config)
    assert isinstance(times, CpuClock)
    assert found.best.meets and found.best.compile_minutes > 0 and machine.is_measured
    assert times.decode.places == (1, 2, 3) and set(times.chunks) == {config.prefill_chunk_size}
    assert min(times.decode.values) > 0 and times.chunks[8].mixed is not None
    assert "are measured on this CPU" in machine.about[0]
    assert found.best.memory > 3 * config.sequence_length


@pytest.mark.usefixtures("quick")
def test_an_artifact_is_measured_as_it_is_and_left_alone(run: Run, cpu_artifact: Artifacts) -> None:
    artifact = cpu_artifact("llama")
    before = sorted((path, path.stat().st_mtime_ns) for path in artifact.rglob("*"))
    code, shown, found = run("--artifact", str(artifact), "--slo", "e2e=60s")
    assert code == 0 and found["step_times"] == "measured" and len(found["candidates"]) == 1
    assert found["commands"] == [f"optimum-cli neuron serve {artifact} --backend engine"]
    assert "export neuron" not in shown
    assert before == sorted((path, path.stat().st_mtime_ns) for path in artifact.rglob("*"))


WRONG = [
    ((), "name either --model, to search its sizes, or --artifact"),
    (("--artifact", "{model}", "--search", "batch=2"), "--search is an option of a search, and --artifact"),
    (("--artifact", "{model}"), "holds no neuron_config.json"),
    (("--model", "{model}", "--sequence-length", "30"), "30 prompt tokens and 8 new ones do not fit --sequence-length 30; raise it to 37"),
    (("--model", "{model}", "--target", "trn2", "--tensor-parallel-size", "3"), "tensor_parallel_size=3"),
    (("--model", "{model}", "--target", "trn2", "--compile-budget", "1s"), "raise --compile-budget"),
    (("--model", "{model}", "--target", "cpu", "--graph-minutes", "1h"), "--graph-minutes 60 is for a device's compiler"),
    (("--model", "no-such-model", "--target", "trn2"), "no-such-model"),
]  # fmt: skip


def test_wrong_options_end_in_one_sentence(run: Run, tiny_checkpoint: Path) -> None:
    for words, told in WRONG:
        code, shown, found = run(*(word.replace("{model}", str(tiny_checkpoint)) for word in words))
        assert code in (1, 2) and not found
        assert told in shown and "Traceback" not in shown
