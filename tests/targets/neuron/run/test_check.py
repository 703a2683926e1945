# SPDX-License-Identifier: Apache-2.0
"""optimum-cli neuron check: what is right passes, and each fault is found, named, and given a remedy."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.tools import NeuronTools
from helpers import export_tiny
from optimum.commands import optimum_cli
from tampering import write
from traces import read_trace

from optimum_neuron.artifact.artifact import MANIFEST_NAME, Artifact
from optimum_neuron.core import PromptPiece, StepOutput
from optimum_neuron.runtime.golden import GOLDEN_NAME, Golden
from optimum_neuron.runtime.profile import TRACE_NAME
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.targets.neuron.graphs.io import COPY_SLOT, SAMPLERS
from optimum_neuron.targets.neuron.run.executors import HloExecutable
from optimum_neuron.tools.check import step_checks
from optimum_neuron.tools.check.checks import REMEDIES
from optimum_neuron.tools.check.step_checks import CheckError


pytest_plugins = ("fakes.plugin",)


@pytest.fixture
def artifact(hlo_artifact: Callable[[str], Path]) -> Path:
    """Not to be changed."""
    return hlo_artifact("llama")


def check(*arguments: object) -> int:
    """optimum-cli neuron check, in this process, where the fakes are; returns the exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["optimum-cli", "neuron", "check", "--runs", "1", *map(str, arguments)])
        try:
            optimum_cli.main()
        except SystemExit as ended:
            assert isinstance(ended.code, int)
            return ended.code
    return 0


def results(path: Path, report: Path, *options: object) -> tuple[int, dict[str, dict]]:
    """The exit code, and results by name."""
    code = check(path, "--json", report, *options)
    return code, {result["name"]: result for result in json.loads(report.read_text(encoding="utf-8"))["results"]}


@pytest.mark.parametrize(("target", "package"), [("hlo", None), ("trn2", "nrt")])
def test_an_artifact_that_works_passes_and_can_be_profiled(
    target: str,
    package: str | None,
    neuron_sdk: Callable[..., NeuronTools],
    sharp_checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # no path is wrapped
    if package is not None:
        neuron_sdk(target, package)
    path, report, folder = tmp_path / "out[/bold]", tmp_path / "reports" / "check.json", tmp_path / "profile"
    certified = target == "hlo"
    artifact = export_tiny(sharp_checkpoints["llama"], path, target=target, certificate=certified)
    code, found = results(artifact, report, "--profile", folder)
    assert code == 0 and list(found) == list(REMEDIES)
    others = {name: result["status"] for name, result in found.items() if result["status"] != "passed"}
    # This model keeps no state, and there is no neuron-monitor here, or no device.
    assert others == dict.fromkeys(("snapshots", "memory", *(() if certified else ("certificate",))), "skipped")
    assert found["certificate"]["values"].get("layers") == ("2 of 2" if certified else None)
    assert (found["compiler"]["values"]["operators listed"] > 0) == (package is not None)
    steps = json.loads((artifact / MANIFEST_NAME).read_text())["graphs"]
    assert set(found["latency"]["values"]) == {f"{name} ms" for name in steps}
    facts = json.loads(report.read_text())["facts"]
    assert (facts["devices"] or {}).get("generation") == (target if package else None)
    shown = capsys.readouterr()
    assert "out[/bold]" in shown.out and f"profile in {folder}: trace.json" in shown.err  # a name is no markup
    told, graphs = read_trace(folder), {*steps, COPY_SLOT, *SAMPLERS.values()}
    assert set(told.names("graphs")) == graphs and told.facts["target"] == target
    captured = {path.name.partition("_vnc")[0] for path in folder.glob("device/*/*.ntff")}
    assert captured == (graphs if package else set()) and (folder / "device").exists() == bool(package)
    assert check(artifact, "--profile", folder) == 1
    assert "(File exists); name a new folder" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("again", [False, True])
def test_signals_leave_no_half_of_a_profile(
    again: bool, number: int, code: int, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ends the checks in their third run of a graph; where it comes again, the trace of the others is being written."""
    folder, report = tmp_path / "profile", tmp_path / "check.json"
    run, replace, left = HloExecutable.run, os.replace, [2]

    def interrupted_run(*arguments: Any) -> Sequence[np.ndarray]:
        left[0] -= 1
        if left[0] < 0:
            signal.raise_signal(number)
        return run(*arguments)

    def interrupted_replace(unfinished: str, path: Path) -> None:
        if again:
            signal.raise_signal(number)
        replace(unfinished, path)

    monkeypatch.setattr(HloExecutable, "run", interrupted_run)
    monkeypatch.setattr(os, "replace", interrupted_replace)
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        assert check(artifact, "--profile", folder, "--json", report) == code
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert not report.exists()
    assert [path.name for path in folder.iterdir()] == ([] if again else [TRACE_NAME])
    assert again or len(read_trace(folder).names("graphs")) == 2


def failed(found: dict[str, dict]) -> list[str]:
    return [name for name, result in found.items() if result["status"] == "failed"]


def test_tokens_that_the_host_did_not_record_fail_and_logits_that_are_no_numbers_whatever_the_tokens(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    golden, nothing = Golden.read(artifact), np.full(300, np.nan, np.float32)
    other = [(token + 1) % 300 for token in golden.tokens]
    changed = dataclasses.replace(
        golden, tokens=other, candidates=[[token] for token in other], logits=[row[:1] for row in golden.logits]
    )
    with monkeypatch.context() as patch:
        patch.setattr(Golden, "read", lambda folder: changed)
        code, found = results(artifact, tmp_path / "check.json")
    assert code == 1 and failed(found) == ["golden"]
    assert "differ from the recorded" in found["golden"]["problem"]
    assert "separate rounding from a fault" in capsys.readouterr().out
    monkeypatch.setattr(step_checks, "replay", lambda *_: [(token, nothing) for token in golden.tokens])
    monkeypatch.setattr(step_checks, "prefill", lambda *_: nothing)
    code, found = results(artifact, tmp_path / "check.json")
    assert code == 1 and failed(found) == ["golden", "chunks", "neighbours", "slot copy"]
    assert all("nan" in found[name]["problem"] for name in failed(found)[:3])


def test_a_row_that_reads_another_ones_cache_is_found(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, state = step_checks.prefill, Artifact.open(artifact).states()[0].name

    def leaking(runner: GraphRunner, slot: int, prompt: np.ndarray, pieces: int) -> np.ndarray:
        logits = prefill(runner, slot, prompt, pieces)
        return logits + runner.executable.read_state(state)[1].sum()

    monkeypatch.setattr(step_checks, "prefill", leaking)
    code, found = results(artifact, tmp_path / "check.json")
    assert code == 1 and "neighbours" in failed(found) and found["golden"]["status"] == "passed"


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("unchecked", "token id -1 was given to a graph, and the model takes those from 0 to 299"),
        ("edge", "token id 299 makes logits that are not finite"),
        ("choice", "after token id 0 it chose 300, of 300 tokens"),
    ],
)
def test_token_ids_at_the_edge_of_the_vocabulary_are_tried(
    fault: str, told: str, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Artifact.open(artifact)

    class Faulty:
        """Computes nothing."""

        def reserve_slots(self, tokens: Sequence[int]) -> None:
            assert list(tokens) == [1]

        def run_step(self, chunks: list[PromptPiece]) -> StepOutput:
            (token,) = chunks[0].token_ids
            if not 0 <= token < 300 and fault != "unchecked":
                raise ValueError(token)
            logits = np.full((1, 300), np.nan if fault == "edge" and token == 299 else 0.0)
            return StepOutput(chunk_logits=logits, chunk_tokens=np.array([300 if fault == "choice" else 0]))

    with pytest.raises(CheckError, match=told):
        step_checks.check_token_ids(opened, Faulty())


def test_without_a_device_the_rest_is_skipped_and_a_limit_that_is_none_refused(
    neuron_sdk: Callable[..., NeuronTools],
    sharp_checkpoints: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    neuron_sdk(None, "nrt")
    artifact = export_tiny(sharp_checkpoints["llama"], tmp_path / "out", target="trn2")
    code, found = results(artifact, tmp_path / "check.json")
    assert code == 1 and "no Neuron device" in found["load"]["problem"]
    later = list(REMEDIES)[list(REMEDIES).index("load") + 1 :]
    assert [found[name]["status"] for name in later] == ["skipped"] * len(later)
    capsys.readouterr()
    assert check(artifact, "--rank-timeout", "0") == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: rank_timeout=0.0 is no time for a step")


@pytest.mark.parametrize("damage", ["missing", "changed", "no JSON"])
def test_golden_tokens_that_cannot_be_used_are_refused_in_one_sentence(
    damage: str, artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = Path(shutil.copytree(artifact, tmp_path / "out"))
    golden = artifact / GOLDEN_NAME
    text = golden.read_text()
    if damage == "no JSON":
        write(artifact, GOLDEN_NAME, ("{" + text[1:-2] + ",").encode())
    elif damage == "changed":
        golden.write_text(text.replace("1", "2"))
    else:
        golden.unlink()
        manifest = json.loads((artifact / MANIFEST_NAME).read_text())
        del manifest["files"][GOLDEN_NAME]
        (artifact / MANIFEST_NAME).write_text(json.dumps(manifest))
    assert check(artifact) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert GOLDEN_NAME in captured.err and "export the model again" in captured.err
