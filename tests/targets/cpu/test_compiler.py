# SPDX-License-Identifier: Apache-2.0
"""Compiling for the cpu target through the cache: each graph once, unless what the cache has is broken or of no use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch._inductor
from helpers import export_tiny, folder_bytes, load_model, tiny_config

from optimum_neuron.artifacts.artifact import Artifact, ArtifactError
from optimum_neuron.graphs.checks.inspect import inspect_model
from optimum_neuron.graphs.kv_cache import KVCache
from optimum_neuron.graphs.spec import GraphSpec, graph_specs, state_specs
from optimum_neuron.targets.cache import CACHE_VARIABLE, CompileCache
from optimum_neuron.targets.cpu import compiler, kernels, loader, worker
from optimum_neuron.targets.cpu.compiler import CACHE_KIND, KERNEL_LIBRARY
from optimum_neuron.targets.cpu.package import Facts


GRAPH = "token_generation_context64"


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An empty cache, and a stand-in for the compiling processes; holds what they were asked for."""
    asked: list[str] = []

    class Worker:
        def __init__(self, job: Any, library: Path | None, scratch: Path) -> None:
            assert library is None or library.read_bytes() == b"library"

        def compile(self, spec: GraphSpec, output: Path) -> None:
            asked.append(spec.name)
            output.write_bytes(spec.name.encode() * 100)
            output.with_suffix(".safetensors").write_bytes(b"constants")

        def end(self) -> None:
            pass

    def build(output: Path) -> None:
        asked.append(output.name)
        output.write_bytes(b"library")

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_Worker", Worker)
    monkeypatch.setattr(kernels, "build", build)
    monkeypatch.setattr(kernels, "are_fast_here", lambda: True)
    return asked


def entry_file(folder: Path, name: str) -> Path:
    """The cache's own file of what an artifact has."""
    data = (folder / "graphs" / name).read_bytes()
    suffix = Path(name).suffix
    (found,) = (path for path in CompileCache(CACHE_KIND).folder.glob(f"*/*{suffix}") if path.read_bytes() == data)
    return found


@pytest.mark.parametrize("name", [f"{GRAPH}.pt2", KERNEL_LIBRARY])
@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"hostile"), Path.unlink], ids=["changed", "gone"])
def test_what_is_broken_in_the_cache_is_compiled_again_and_nothing_else(
    compiled: list[str], tiny_checkpoint: Path, tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    path = export_tiny(tiny_checkpoint, tmp_path / "first", target="cpu")
    before = folder_bytes(path / "graphs")
    assert sorted(compiled) == sorted([KERNEL_LIBRARY, *(graph.name for graph in graph_specs(tiny_config()))])
    assert len(before) == 2 * len(compiled) - 1
    compiled.clear()
    damage(entry_file(path, name))
    for turn in ("second", "third"):
        again = export_tiny(tiny_checkpoint, tmp_path / turn, target="cpu")
        assert folder_bytes(again / "graphs") == before
    assert compiled == [name.removesuffix(".pt2")]


def test_an_export_after_a_package_did_not_load_compiles_it_again(
    compiled: list[str], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """The stand-in's packages are none: their digests are right, and they do not load."""
    path = export_tiny(tiny_checkpoint, tmp_path / "artifact", target="cpu")
    compiled.clear()
    graph = Artifact.open(path).graphs[0].name
    with pytest.raises(ArtifactError, match=rf"{graph}\.pt2 cannot be loaded: .*; export the model again"):
        loader._load_package(path / "graphs" / f"{graph}.pt2")
    export_tiny(tiny_checkpoint, path, target="cpu", overwrite=True)
    assert compiled == [graph]


def test_a_cache_that_others_may_write_to_stops_an_export_before_it_starts(
    compiled: list[str], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    CompileCache(CACHE_KIND).folder.chmod(0o777)
    with pytest.raises(PermissionError, match=r"can be changed by other users, and this process would run what it"):
        export_tiny(tiny_checkpoint, tmp_path / "out" / "artifact", target="cpu")
    assert not (tmp_path / "out").exists() and not compiled


def test_a_package_that_does_not_load_is_no_answer(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = load_model(tiny_checkpoint), tiny_config()

    def package(program: object, *, package_path: str, inductor_configs: object) -> None:
        Path(package_path).write_bytes(b"half a package")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", package)
    request = {"graph": asdict(graph_specs(config)[0]), "output": str(tmp_path / "graph.pt2")}
    spec = inspect_model(model)
    facts = Facts(spec, config.dtype, None, None)
    answer = worker._compile(model, KVCache(state_specs(config, spec)), request, facts)
    assert answer["error"].startswith("RuntimeError: ")


def test_a_library_that_does_not_load_is_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source.cpp"
    source.write_text("int nowhere(); int here() { return nowhere(); }")
    monkeypatch.setattr(kernels, "SOURCES", (source,))
    monkeypatch.setattr(kernels.cpp_extension, "include_paths", list)
    with pytest.raises(RuntimeError, match=r"failed on the CPU kernels:[\s\S]*undefined symbol: \S*nowhere"):
        kernels.build(tmp_path / "kernels.so")


def test_code_is_compiled_for_the_threads_that_its_key_names(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for those that a new process would have by itself."""
    given: list[str] = []

    def start(command: list[str], *, env: dict[str, str], **_: Any) -> NoReturn:
        given.append(env["OMP_NUM_THREADS"])
        raise RuntimeError("enough")

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(kernels, "are_fast_here", lambda: False)
    monkeypatch.setattr(compiler, "TiedProcess", start)
    torch.set_num_threads(3)
    with pytest.raises(RuntimeError, match="enough"):
        export_tiny(tiny_checkpoint, tmp_path / "artifact", target="cpu")
    assert given == ["3"]
