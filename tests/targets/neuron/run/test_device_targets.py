# SPDX-License-Identifier: Apache-2.0
"""Device targets end to end: the code that would run on hardware, on fakes that execute the HLO the compiler was given."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from fakes.tools import NeuronTools
from helpers import VOCAB, export_tiny, random_tokens, tiny_config
from optimum.commands import optimum_cli
from transformers.models.llama.modeling_llama import LlamaMLP

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.artifact.artifact import MANIFEST_NAME, Artifact
from optimum_neuron.checkpoints.checkpoint import Checkpoint
from optimum_neuron.checkpoints.quantize.rounding import FP8_LARGEST, FP8_LARGEST_ON
from optimum_neuron.step.state_specs import byte_count, state_specs
from optimum_neuron.targets.neuron.compile.compiler import KINDS
from optimum_neuron.targets.neuron.run import ranks
from optimum_neuron.targets.neuron.sdk.errors import NeuronRuntimeError
from optimum_neuron.targets.neuron.sdk.hardware import CHIPS
from optimum_neuron.tools.inspect.collect import collect_memory


pytest_plugins = ("fakes.plugin",)
PROMPTS = [random_tokens(length, seed=length).tolist() for length in (5, 21, 30, 13)]
PROMPTS.append([*PROMPTS[2], 7])  # starts like another one: its cache rows are copied on the device
FP8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
MORE = ("trn1", "nxd", {}), ("trn2", "nrt", FP8), ("trn3", "nrt", FP8)
RUNTIMES = [("trn3", "nrt", {}), ("inf2", "nxd", FP8), *(pytest.param(each, marks=pytest.mark.full) for each in MORE)]


Export = Callable[..., Path]


@pytest.fixture
def export(neuron_sdk: Callable[..., NeuronTools], sharp_checkpoints: dict[str, Path], tmp_path: Path) -> Export:
    """Exports a model for trn2, on a machine with or without devices, and returns the artifact."""

    def make(target: str = "trn2", package: str = "nrt", *, device: bool = True, **options: Any) -> Path:
        neuron_sdk(target if device else None, package)
        return export_tiny(sharp_checkpoints["llama"], tmp_path / "out", target=target, overwrite=True, **options)

    return make


def answers(model: NeuronModelForCausalLM) -> tuple:
    """Greedy through the engine, sampled through generate."""
    greedy = [output.generated_tokens for output in model.generate_batch(PROMPTS, max_new_tokens=6).values()]
    torch.manual_seed(3)
    sampled = model.generate(torch.tensor([PROMPTS[1]]), max_new_tokens=8, do_sample=True, top_k=9)
    return greedy, sampled.tolist()


@pytest.mark.parametrize("case", RUNTIMES)
def test_generate_and_engine_give_the_tokens_of_the_eager_target(
    case: Any, export: Export, sharp_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, package, options = case
    model = NeuronModelForCausalLM.from_pretrained(export(target, package, **options))
    monkeypatch.setitem(FP8_LARGEST_ON, "eager", FP8_LARGEST_ON.get(target, FP8_LARGEST))
    config = tiny_config(target="eager", **options)
    eager = NeuronModelForCausalLM.from_pretrained(sharp_checkpoints["llama"], export=True, config=config)
    assert answers(model) == answers(eager)


def test_manifest_and_inspect_tell_how_every_graph_was_compiled_and_loading_needs_a_device(
    export: Export, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = export(device=False)  # graphs are compiled anywhere
    with pytest.raises(RuntimeError, match="trn2"):
        NeuronModelForCausalLM.from_pretrained(path)
    manifest = json.loads((path / MANIFEST_NAME).read_text())
    data = manifest["target_data"]
    assert data["target"] == "trn2" and data["lnc"] == 2 and "neuronx-cc" in data["versions"]
    assert sorted(data["graphs"]) == sorted([*manifest["graphs"], "copy_slot", "sample_chunk", "sample_decode"])
    for name, graph in data["graphs"].items():
        level = "-O2" if graph["kind"] == "token_generation" else "-O1"
        assert graph["kind"] in KINDS and {f"{name}.hlo", "--target=trn2", level} <= set(graph["argv"])
    kept = {Path(name).suffix for name in manifest["files"] if name.startswith("graphs/")}
    assert kept == {".hlo", ".json", ".neff"}
    capsys.readouterr()
    facts_file, page = tmp_path / "facts.json", tmp_path / "page.html"
    run_command("neuron", "inspect", str(path))
    shown = capsys.readouterr().out
    assert "compiled with neuronx-cc" in shown and "token_generation_context64" in shown
    run_command("neuron", "inspect", str(path), "--json", str(facts_file), "--html", str(page))
    facts = json.loads(facts_file.read_text())
    (core,) = facts["memory"]
    assert core["estimated"] == ["scratch", "reserve"] and core["capacity"] == CHIPS["trn2"].core_hbm
    assert min(core["parts"].values()) > 0 and sum(core["parts"].values()) < core["capacity"]
    assert all(each["cost"]["seconds at least"] > 0 for each in facts["graphs"])
    run_command("neuron", "lint", str(path))
    assert "no rule is broken" in capsys.readouterr().out
    assert facts["lint"]["missing"] == "" and "neuronx-cc" in facts["compiled_with"]
    assert "Scratch and reserve are estimates" in page.read_text()


def test_an_export_after_the_runtime_refused_a_neff_compiles_it_again(
    export: Export, neuron_tools: NeuronTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = export()
    compiled = len(neuron_tools.calls())
    for code, times in ((4, 1), (2, 2)):  # no memory: nothing is wrong with the code

        def refuse(*_: object, code: int = code) -> NoReturn:
            raise NeuronRuntimeError("refused", code=code)

        monkeypatch.setattr(ranks, "RankedExecutable", refuse)
        with pytest.raises(NeuronRuntimeError, match="refused"):
            NeuronModelForCausalLM.from_pretrained(path)
        export()
        assert len(neuron_tools.calls()) == times * compiled


def run_command(*arguments: str) -> None:
    """optimum-cli, in this process, where the fakes are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["optimum-cli", *arguments])
        optimum_cli.main()


def test_lint_tells_findings_by_its_exit_code(
    sharp_checkpoints: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    length = ("--sequence-length", "128")
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, x).cumprod(-1))
    with pytest.raises(SystemExit) as ended:
        run_command("neuron", "lint", "--model", str(sharp_checkpoints["llama"]), *length)
    assert ended.value.code == 1 and "reduce-window" in capsys.readouterr().out


def test_lint_shows_what_each_graph_costs_in_80_columns(
    hlo_artifact: Callable[[str], Path],
    sharp_checkpoints: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run_command("neuron", "lint", str(hlo_artifact("llama")), "--cost")
    lines = capsys.readouterr().out.splitlines()
    assert "on one core of hlo" in lines[0] and all(len(line) <= 80 for line in lines)
    rows = [line for line in lines if line.startswith("│")]
    names = {path.stem for path in (hlo_artifact("llama") / "graphs").glob("*.hlo")}
    assert sum(row.endswith("- │") for row in rows) == len(names)  # hlo has no peaks
    run_command("neuron", "lint", "--model", str(sharp_checkpoints["llama"]), "--sequence-length", "128", "--cost")
    assert "on one core of trn2" in capsys.readouterr().out


SMALL = ("--model", "CHECKPOINT", "--tensor-parallel-size")


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ((), "either an artifact's folder or --model"),
        (("ARTIFACT", "--model", "x"), "one of them"),
        (("ARTIFACT", "--batch-size", "2"), "has its own batch_size"),
        (("--model", "CHECKPOINT", "--sequence-length", "512"), "max_position_embeddings=256"),
        ((*SMALL, "0"), "tensor_parallel_size=0"),
        ((*SMALL, "3"), "trn2 connects, which are 1, 2, 4, 8, 16, 32, 64; use 2 or 4"),
    ],
)
def test_lint_refuses_in_one_sentence(
    arguments: tuple[str, ...],
    fragment: str,
    sharp_checkpoints: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {"ARTIFACT": str(tmp_path), "CHECKPOINT": str(sharp_checkpoints["llama"])}
    with pytest.raises(SystemExit) as ended:
        run_command("neuron", "lint", *(names.get(each, each) for each in arguments))
    assert ended.value.code == 1 and fragment in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("NEURON_LOGICAL_NC_CONFIG", "3"),
        ("NEURON_CC_FLAGS", "--target=trn1"),
        ("NEURON_CC_FLAGS_MIXED", "--lnc=1"),
        ("NEURON_CC_FLAGS_DECODE", "-O1"),  # a kind is token_generation
    ],
)
def test_a_wrong_environment_is_refused_before_anything_is_written(
    variable: str, value: str, export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_model(*_: object) -> NoReturn:
        raise AssertionError("it went on")

    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(Checkpoint, "load_model", load_model)
    with pytest.raises(ValueError, match=variable):
        export(device=False)
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_without_the_compiler_or_where_it_refuses_a_graph(
    export: Export, neuron_tools: NeuronTools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="for trn2 needs the Neuron compiler"):
        patch.setenv("PATH", os.pathsep.join(os.environ["PATH"].split(os.pathsep)[1:]))
        export()
    neuron_tools.break_compiler(every="EVRF007")
    with pytest.raises(RuntimeError, match=r"graph \w+ could not be compiled: .*EVRF007"):
        export()
    assert not (tmp_path / "out").exists()


def test_weights_of_each_rank_are_written_and_none_of_the_whole(export: Export) -> None:
    path = export(device=False, tensor_parallel_size=2)
    assert sorted(file.name for file in (path / "weights").iterdir()) == ["tp0.safetensors", "tp1.safetensors"]
    description = json.loads((path / "graphs" / "token_generation_context64.json").read_text())
    assert description["world_size"] == 2
    states = {entry["name"]: entry["shape"] for entry in description["inputs"] if entry["role"] == "state"}
    assert states.pop("scores.decode")[1] == VOCAB // 2
    assert states.pop("chosen.tokens") == [tiny_config().batch_size]  # whole on every rank
    assert {shape[1] for shape in states.values()} == {1}  # heads, of 2 in the whole model
    (first, second), _ = collect_memory(Artifact.open(path), 0)
    assert (first.place, second.place) == ("core 0", "core 1") and first.parts == second.parts
    assert first.parts["weights"] == (path / "weights" / "tp0.safetensors").stat().st_size
    assert 2 * first.parts["KV cache"] == byte_count(state_specs(tiny_config(), Artifact.open(path).model))
