# SPDX-License-Identifier: Apache-2.0
"""Device targets end to end: the code that would run on hardware, on fakes that execute the HLO the compiler was given."""

from __future__ import annotations

import dataclasses
import json
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
from optimum_neuron.runtime.golden import Golden
from optimum_neuron.step.state_specs import byte_count, state_specs
from optimum_neuron.targets import resolve_target
from optimum_neuron.targets.neuron.run import ranks
from optimum_neuron.targets.neuron.run.load_plan import LoadPlan
from optimum_neuron.targets.neuron.sdk.hardware import CHIPS
from optimum_neuron.targets.neuron.sdk.runtime_errors import NeuronRuntimeError
from optimum_neuron.targets.rank_options import RankOptions
from optimum_neuron.tools.inspect.collect import collect_memory


pytest_plugins = ("fakes.plugin",)
PROMPTS = [random_tokens(length, seed=length).tolist() for length in (5, 21, 30, 13)]
PROMPTS.append([*PROMPTS[2], 7])  # starts like another one: its cache rows are copied on the device
# A target and the runtime that its graphs run on.
RUNTIMES = [("trn2", "lite"), ("trn3", "nrt"), ("inf2", "nxd"), pytest.param("trn1", "nxd", marks=pytest.mark.full)]


def answers(model: NeuronModelForCausalLM) -> tuple:
    """Greedy through the engine, sampled through generate."""
    greedy = [output.generated_tokens for output in model.generate_batch(PROMPTS, max_new_tokens=6).values()]
    torch.manual_seed(3)
    sampled = model.generate(torch.tensor([PROMPTS[1]]), max_new_tokens=8, do_sample=True, top_k=9)
    return greedy, sampled.tolist()


@pytest.mark.parametrize(("target", "package"), RUNTIMES)
def test_generate_and_engine_give_the_tokens_of_the_eager_target(
    target: str,
    package: str,
    neuron_sdk: Callable[..., NeuronTools],
    sharp_checkpoints: dict[str, Path],
    tmp_path: Path,
) -> None:
    neuron_sdk(target, package)
    path = export_tiny(sharp_checkpoints["llama"], tmp_path / "out", target=target)
    model = NeuronModelForCausalLM.from_pretrained(path)
    eager = NeuronModelForCausalLM.from_pretrained(
        sharp_checkpoints["llama"], export=True, config=dataclasses.replace(tiny_config(), target="eager")
    )
    assert answers(model) == answers(eager)


def test_the_manifest_records_how_every_graph_was_compiled(
    neuron_sdk: Callable[..., NeuronTools], sharp_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    neuron_sdk(None, "lite")  # no device: graphs are compiled anywhere
    path = export_tiny(sharp_checkpoints["llama"], tmp_path / "out", target="trn2")
    manifest = json.loads((path / MANIFEST_NAME).read_text())
    data = manifest["target_data"]
    assert data["target"] == "trn2" and data["lnc"] == 2 and "neuronx-cc" in data["versions"]
    assert sorted(data["graphs"]) == sorted([*manifest["graphs"], "copy_slot", "sample_chunk", "sample_decode"])
    for name, graph in data["graphs"].items():
        assert f"{name}.hlo" in graph["argv"] and "--target=trn2" in graph["argv"]
        level = "-O2" if graph["kind"] == "token_generation" else "-O1"
        assert level in graph["argv"]
    kept = {Path(name).suffix for name in manifest["files"] if name.startswith("graphs/")}
    assert kept == {".hlo", ".json", ".neff"}


def test_an_export_after_the_runtime_refused_a_neff_compiles_it_again(
    neuron_sdk: Callable[..., NeuronTools],
    sharp_checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tools = neuron_sdk("trn2", "lite")
    path = export_tiny(sharp_checkpoints["llama"], tmp_path / "out", target="trn2")
    compiled = len(tools.calls())

    def refuse(code: int) -> Callable[..., Any]:
        def fail(plan: LoadPlan, options: RankOptions) -> NoReturn:
            raise NeuronRuntimeError("refused", code=code)

        return fail

    for code in (4, 2):  # no memory: nothing is wrong with the code
        export_tiny(sharp_checkpoints["llama"], path, target="trn2", overwrite=True)
        assert len(tools.calls()) == compiled
        monkeypatch.setattr(ranks, "load_graphs", refuse(code))
        with pytest.raises(NeuronRuntimeError, match="refused"):
            NeuronModelForCausalLM.from_pretrained(path)
    export_tiny(sharp_checkpoints["llama"], path, target="trn2", overwrite=True)
    assert len(tools.calls()) == 2 * compiled


def test_auto_is_the_device_that_the_machine_has(
    neuron_sdk: Callable[..., NeuronTools], sharp_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    assert resolve_target("auto") == "cpu"
    neuron_sdk("trn2", "lite")
    assert resolve_target("auto") == "trn2" and resolve_target("cpu") == "cpu"


def test_inspect_tells_how_an_artifact_was_compiled(
    neuron_sdk: Callable[..., NeuronTools],
    sharp_checkpoints: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    neuron_sdk(None, "lite")
    path = export_tiny(sharp_checkpoints["llama"], tmp_path / "out", target="trn2")
    run_command("neuron", "inspect", str(path))
    shown = capsys.readouterr().out
    assert "compiled with neuronx-cc" in shown and "token_generation_context64" in shown
    run_command(
        "neuron", "inspect", str(path), "--json", str(tmp_path / "facts.json"), "--html", str(tmp_path / "page.html")
    )
    facts = json.loads((tmp_path / "facts.json").read_text())
    (core,) = facts["memory"]
    assert core["estimated"] == ["scratch", "reserve"] and core["capacity"] == CHIPS["trn2"].core_hbm
    assert min(core["parts"].values()) > 0 and sum(core["parts"].values()) < core["capacity"]
    assert all(each["cost"]["seconds at least"] > 0 for each in facts["graphs"])
    assert facts["lint"]["missing"] == "" and "neuronx-cc" in facts["compiled_with"]
    assert "Scratch and reserve are estimates" in (tmp_path / "page.html").read_text()


def run_command(*arguments: str) -> None:
    """optimum-cli, in this process, where the fakes are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["optimum-cli", *arguments])
        optimum_cli.main()


def test_lint_tells_findings_by_its_exit_code(
    neuron_sdk: Callable[..., NeuronTools],
    sharp_checkpoints: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    neuron_sdk(None, "lite")
    path = export_tiny(sharp_checkpoints["llama"], tmp_path / "out", target="trn2")
    run_command("neuron", "lint", str(path))
    run_command("neuron", "lint", "--model", str(sharp_checkpoints["qwen3"]), "--sequence-length", "128")
    assert "error" not in capsys.readouterr().out
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, x).cumprod(-1))
    with pytest.raises(SystemExit) as ended:
        run_command("neuron", "lint", "--model", str(sharp_checkpoints["llama"]), "--sequence-length", "128")
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


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ([], "either an artifact's folder or --model"),
        (["ARTIFACT", "--model", "x"], "one of them"),
        (["ARTIFACT", "--batch-size", "2"], "has its own batch_size"),
        (["--model", "CHECKPOINT", "--sequence-length", "512"], "max_position_embeddings=256"),
        (["--model", "CHECKPOINT", "--tensor-parallel-size", "0"], "tensor_parallel_size=0"),
        (
            ["--model", "CHECKPOINT", "--tensor-parallel-size", "3"],
            "trn2 connects, which are 1, 2, 4, 8, 16, 32, 64; use 2 or 4",
        ),
        (["--model", "CHECKPOINT", "--target", "inf2", "--tensor-parallel-size", "12"], "use 8 or 24"),
        (["--model", "CHECKPOINT", "--target", "auto"], "target='auto': this machine has no Neuron device"),
    ],
)
def test_lint_refuses_in_one_sentence(
    arguments: list[str],
    fragment: str,
    sharp_checkpoints: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {"ARTIFACT": str(tmp_path), "CHECKPOINT": str(sharp_checkpoints["llama"])}
    with pytest.raises(SystemExit) as ended:
        run_command("neuron", "lint", *(names.get(each, each) for each in arguments))
    assert ended.value.code == 1 and fragment in capsys.readouterr().err


def test_golden_tokens_are_those_of_the_model(
    neuron_sdk: Callable[..., NeuronTools], sharp_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    neuron_sdk(None, "lite")
    path = export_tiny(sharp_checkpoints["qwen3"], tmp_path / "out", target="trn2")
    golden = Golden.read(path)
    model = NeuronModelForCausalLM.from_pretrained(
        sharp_checkpoints["qwen3"], export=True, config=dataclasses.replace(tiny_config(), target="eager")
    )
    ids = torch.tensor([golden.prompt])
    expected = model.generate(ids, max_new_tokens=len(golden.tokens), do_sample=False, eos_token_id=None)
    assert golden.tokens == expected[0, len(golden.prompt) :].tolist()
    assert [candidates[0] for candidates in golden.candidates] == golden.tokens
    assert len(golden.prompt) > tiny_config().prefill_chunk_size


@pytest.mark.parametrize(
    ("variable", "value"), [("NEURON_LOGICAL_NC_CONFIG", "3"), ("NEURON_CC_FLAGS", "--target=trn1")]
)
def test_a_wrong_environment_is_refused_before_anything_is_written(
    variable: str,
    value: str,
    neuron_sdk: Callable[..., NeuronTools],
    sharp_checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    neuron_sdk(None, "lite")
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(Checkpoint, "load_model", forbidden)
    with pytest.raises(ValueError, match=variable):
        export_tiny(sharp_checkpoints["llama"], tmp_path / "artifacts" / "out", target="trn2")
    assert not (tmp_path / "artifacts").exists()


def forbidden(*_: object) -> None:
    raise AssertionError("it went on")


def test_a_machine_without_device_says_so(
    neuron_sdk: Callable[..., NeuronTools], sharp_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    neuron_sdk(None, "lite")
    path = export_tiny(sharp_checkpoints["llama"], tmp_path / "out", target="trn2")
    with pytest.raises(RuntimeError, match="trn2"):
        NeuronModelForCausalLM.from_pretrained(path)


def test_without_the_compiler_nothing_is_written(sharp_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="compiling for trn2 needs the Neuron compiler"):
        export_tiny(sharp_checkpoints["llama"], tmp_path / "out", target="trn2")
    assert not list(tmp_path.iterdir())


def test_a_graph_that_the_compiler_refuses_leaves_nothing(
    neuron_sdk: Callable[..., NeuronTools], sharp_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    tools = neuron_sdk("trn2", "lite")
    tools.break_compiler(every="EVRF007")
    with pytest.raises(RuntimeError, match=r"graph \w+ could not be compiled: .*EVRF007"):
        export_tiny(sharp_checkpoints["llama"], tmp_path / "out", target="trn2")
    assert not (tmp_path / "out").exists()


def test_weights_of_each_rank_are_written_and_none_of_the_whole(
    neuron_sdk: Callable[..., NeuronTools], sharp_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    neuron_sdk(None, "lite")
    path = export_tiny(sharp_checkpoints["llama"], tmp_path / "out", target="trn2", tensor_parallel_size=2)
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
