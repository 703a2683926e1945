# SPDX-License-Identifier: Apache-2.0
"""The cpu target computes what the eager one does, from one copy of the weights, with or without a compiler."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from helpers import (
    LENGTH,
    Opener,
    artifact_runner,
    export_tiny,
    folder_bytes,
    generate,
    prefill_pieces,
    python_process,
    random_tokens,
    read_states,
)
from torch import Tensor
from torch.nn import functional

from optimum_neuron.artifacts.artifact import MANIFEST_NAME, WEIGHTS_NAME, ArtifactError
from optimum_neuron.graphs.spec import ModelSpec
from optimum_neuron.runtime.runner import SamplingParams
from optimum_neuron.targets import get_target, resolve_target
from optimum_neuron.targets.cache import cache_folder
from optimum_neuron.targets.cpu import compiler, kernels, loader
from optimum_neuron.targets.cpu.compiler import CACHE_KIND
from optimum_neuron.targets.cpu.host import host_requirements, unmet_requirement
from optimum_neuron.targets.eager import _EqualRows


pytestmark = pytest.mark.slow

COMPILED = ("llama", "qwen3")
SAMPLED = SamplingParams(top_k=40, top_p=0.9, temperature=1.5)
GRAPHS = ("chunked_prefill_chunk8_context64", "mixed_chunk8_context64", "token_generation_context64")
PROMPT = random_tokens(21)
GENERATE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from helpers import artifact_runner, generate, random_tokens
print(generate(artifact_runner(Path(sys.argv[1])), random_tokens(21), 8)[0])
"""


@pytest.fixture
def artifact(cpu_artifact: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the compiled Llama, to be damaged."""
    return Path(shutil.copytree(cpu_artifact("llama"), tmp_path / "artifact"))


@pytest.fixture(scope="module")
def expected(open_runner: Opener) -> list[int]:
    return generate(open_runner("llama"), PROMPT, 8)[0]


def edit_target_data(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((path / MANIFEST_NAME).read_text(encoding="utf-8"))
    change(manifest["target_data"])
    (path / MANIFEST_NAME).write_text(json.dumps(manifest), encoding="utf-8")


def forbidden(*_: object, **__: object) -> NoReturn:
    raise AssertionError("must not be called")


@pytest.mark.parametrize("length", [1, 8, 21, LENGTH - 1])
@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", COMPILED)
def test_cpu_equals_eager_token_for_token(
    open_runner: Opener, name: str, sampling: SamplingParams, length: int
) -> None:
    prompt, count = random_tokens(length, seed=length), min(30, LENGTH - length + 1)
    uniforms = torch.rand(count, generator=torch.Generator().manual_seed(length)).tolist()
    tokens, logits = generate(open_runner(name, "cpu"), prompt, count, sampling, uniforms)
    eager_tokens, eager_logits = generate(open_runner(name), prompt, count, sampling, uniforms)
    assert tokens == eager_tokens
    assert (logits - eager_logits).abs().max() < 1e-5
    if sampling.temperature and count > 2:
        assert tokens != generate(open_runner(name, "cpu"), prompt, count)[0]


def test_states_can_be_read_and_written(open_runner: Opener, tiny_specs: dict[str, ModelSpec]) -> None:
    runner, spec = open_runner("llama", "cpu"), tiny_specs["llama"]
    logits = prefill_pieces(runner, 0, PROMPT, [8, 8, 5])
    runner.reset_all()
    prefill_pieces(runner, 0, PROMPT[:16], [8, 8])
    saved = read_states(runner, spec)
    prefill_pieces(runner, 1, random_tokens(8, seed=9), [8])
    for name, state in saved.items():
        runner.executable.write_state(name, torch.zeros_like(state))
        assert not runner.executable.read_state(name).any()
        runner.executable.write_state(name, state)
    assert torch.equal(prefill_pieces(runner, 0, PROMPT[16:], [5]), logits)


def test_loading_needs_no_compiler(cpu_artifact: Callable[[str], Path], expected: list[int], tmp_path: Path) -> None:
    process = python_process(GENERATE, cpu_artifact("llama"), Path(__file__).parents[1], PATH=str(tmp_path))
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert json.loads(output.splitlines()[-1]) == expected


def test_loading_compiles_nothing(
    cpu_artifact: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, expected: list[int]
) -> None:
    monkeypatch.setattr(loader, "compile_graphs", forbidden)
    assert generate(artifact_runner(cpu_artifact("llama")), PROMPT, 8)[0] == expected


MISFITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "torch": (lambda data: data["requires"].update(torch="1.0"), r"compiled for torch 1\.0, and this is torch 2\."),
    "isa": (
        lambda data: data["requires"]["isa"].append("avx9"),
        r"compiled for a CPU with avx9, which this one lacks",
    ),
    "system": (lambda data: data["requires"].update(system="Plan9"), r"compiled for system Plan9, and this is system"),
    "nothing": (lambda data: data.pop("requires"), r"compiled for system None"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_code_that_does_not_fit_this_machine_is_compiled_again(
    artifact: Path, misfit: str, expected: list[int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, words = MISFITS[misfit]
    edit_target_data(artifact, change)
    for graph in GRAPHS:  # what does not fit is not looked at
        (artifact / "graphs" / f"{graph}.pt2").write_bytes(
            bytes((artifact / "graphs" / f"{graph}.pt2").stat().st_size)
        )
    before = folder_bytes(artifact)
    with caplog.at_level(logging.WARNING, "optimum_neuron"):
        tokens = generate(artifact_runner(artifact), PROMPT, 8)[0]
    assert tokens == expected
    assert folder_bytes(artifact) == before
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        RuntimeError, match=rf"cannot be used \(.*{words}.*\), and compiling it again needs a C\+\+"
    ) as caught:
        artifact_runner(artifact)
    assert "\n" not in str(caught.value)
    assert any("compiling the graphs" in message for message in caplog.messages)


def test_code_that_is_not_trusted_is_compiled_again(
    artifact: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (artifact / "graphs").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    assert generate(artifact_runner(artifact, trust_native_code=False), PROMPT, 8)[0] == expected
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"its native code is not trusted.*needs a C\+\+ compiler; install g\+\+"):
        artifact_runner(artifact, trust_native_code=False)


CODE = [f"graphs/{GRAPHS[0]}.pt2", *(["graphs/kernels.so"] if kernels.are_fast_here() else [])]


@pytest.mark.parametrize("name", [*CODE, "config.json", "tokenizer.json"])
def test_nothing_of_a_changed_artifact_is_executed(artifact: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray((artifact / name).read_bytes())
    data[len(data) // 2] ^= 1
    (artifact / name).write_bytes(data)
    monkeypatch.setattr(kernels, "load", forbidden)
    monkeypatch.setattr(loader, "_load_package", forbidden)
    with pytest.raises(ArtifactError, match=rf"{Path(name).name} was changed after the export"):
        artifact_runner(artifact)


@pytest.mark.parametrize("trusted", [True, False])
def test_no_graph_runs_with_changed_weights(artifact: Path, trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray((artifact / WEIGHTS_NAME).read_bytes())
    data[-1] ^= 1
    (artifact / WEIGHTS_NAME).write_bytes(data)
    monkeypatch.setattr(loader, "_load_package", forbidden)
    with pytest.raises(ArtifactError, match=r"model.safetensors was changed after the export"):
        artifact_runner(artifact, trust_native_code=trusted)


def test_weights_and_states_are_one_copy_for_all_graphs(
    cpu_artifact: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: dict[str, Tensor] = {}
    read_weights, allocate_states = loader.read_weights, loader.allocate_states

    def remember(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        bound.update(tensors)
        return dict(bound)

    monkeypatch.setattr(loader, "read_weights", lambda artifact: remember(read_weights(artifact)))
    monkeypatch.setattr(loader, "allocate_states", lambda specs: remember(allocate_states(specs)))
    runner = artifact_runner(cpu_artifact("llama"))
    _, logits = generate(runner, PROMPT, 2)
    assert bound["kv_cache.key_0"].any() and torch.equal(
        runner.executable.read_state("kv_cache.key_0"), bound["kv_cache.key_0"]
    )
    bound["model.lm_head.weight"] *= 2
    _, doubled = generate(runner, PROMPT, 2)
    assert torch.equal(doubled, logits * 2)  # the first row is of the chunk graph, the second of the decode graph


def test_a_second_export_compiles_nothing_again(
    cpu_artifact: Callable[[str], Path],
    tiny_checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = cache_folder(CACHE_KIND)
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()}
    monkeypatch.setattr(compiler, "_compile_missing", forbidden)
    monkeypatch.setattr(kernels, "build", forbidden)
    again = export_tiny(tiny_checkpoints["llama"], tmp_path / "again", target="cpu")
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file()} == before
    assert folder_bytes(again / "graphs") == folder_bytes(cpu_artifact("llama") / "graphs")


def test_other_sizes_types_and_models_do_compile(
    artifact: Path, tiny_checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, code = tmp_path / "cache", set(folder_bytes(artifact / "graphs").values())
    (cache / CACHE_KIND).mkdir(parents=True)
    for entry in cache_folder(CACHE_KIND).iterdir():
        if code & set(folder_bytes(entry).values()):
            shutil.copytree(entry, cache / CACHE_KIND / entry.name)
    monkeypatch.setenv("OPTIMUM_NEURON_CACHE", str(cache))
    asked: list[list[str]] = []

    def record(job: Any, specs: list[Any], *_: object) -> NoReturn:
        asked.append([spec.name for spec in specs])
        raise RuntimeError("enough")

    monkeypatch.setattr(compiler, "_compile_missing", record)
    export_tiny(tiny_checkpoints["llama"], tmp_path / "same", target="cpu")
    others: list[tuple[str, dict[str, Any]]] = [
        ("llama", {"batch_size": 4}),
        ("llama", {"dtype": "bfloat16"}),
        ("gemma2", {}),
    ]
    for name, changes in others:
        with pytest.raises(RuntimeError, match="enough"):
            export_tiny(tiny_checkpoints[name], tmp_path / "other", target="cpu", **changes)
    assert [sorted(graphs) for graphs in asked] == [sorted(GRAPHS)] * 3


def test_a_graph_that_does_not_compile_is_named(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTIMUM_NEURON_CACHE", str(tmp_path / "cache"))
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\nexit 1\n", encoding="ascii")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setattr(kernels, "build", lambda output: output.write_bytes(b"no library"))
    with pytest.raises(RuntimeError, match=r"graph \w+_context64 could not be compiled|a compiling process ended"):
        export_tiny(tiny_checkpoint, tmp_path / "out" / "artifact", target="cpu")
    assert not list((tmp_path / "out").iterdir())
    assert not list((tmp_path / "cache").glob(".*")) and not list((tmp_path / "cache").glob("*.pt2"))


def test_this_machine_meets_its_own_requirements_and_those_of_an_older_cpu() -> None:
    here = host_requirements()
    assert unmet_requirement(here) is None
    assert unmet_requirement(here | {"isa": here["isa"][:1]}) is None


def test_auto_is_the_cpu_and_unknown_targets_are_refused() -> None:
    assert resolve_target("auto") == "cpu" and resolve_target("eager") == "eager"
    with pytest.raises(ValueError, match=r"target='gpu' is not known; choose one of cpu, eager"):
        get_target("gpu")


@pytest.mark.parametrize("function", [torch.sigmoid, functional.silu, functional.gelu, functional.softplus])
def test_eager_activations_round_alike_wherever_a_number_stands(function: Callable[[Tensor], Tensor]) -> None:
    numbers = torch.randn(4096) * 3
    with _EqualRows():
        expected = function(numbers)
        for count in range(4, 132, 4):
            assert torch.equal(function(numbers[:count].clone()), expected[:count])
