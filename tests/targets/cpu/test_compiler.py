# SPDX-License-Identifier: Apache-2.0
"""Compiling for the cpu target through the caches: each graph and the kernels once, unless what a cache has is broken."""

from __future__ import annotations

import queue
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import artifact_runner, export_tiny, folder_bytes, tiny_config

from optimum_neuron.artifact.user_cache import CACHE_VARIABLE
from optimum_neuron.kernels.host import native_build
from optimum_neuron.kernels.host.instruction_sets import choose_instruction_set
from optimum_neuron.kernels.host.processes import Processes
from optimum_neuron.step.spec import graph_specs
from optimum_neuron.targets import get_target
from optimum_neuron.targets.cache.store import CompileCache
from optimum_neuron.targets.cpu import compiler
from optimum_neuron.targets.cpu.compiler import CACHE_KIND
from optimum_neuron.targets.cpu.native_library import load_kernels


GRAPHS = sorted(graph.name for graph in graph_specs(tiny_config()))
# What a library of kernels has.
FUNCTIONS = ("step_interface", "step_plan", "step_free", "step_run")


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An empty cache of plans; holds the graphs that were compiled."""
    asked: list[str] = []
    compile_one = compiler._compile_graph

    def record(model: object, states: object, spec: object, *others: object) -> None:
        asked.append(spec.name)  # type: ignore[attr-defined]
        compile_one(model, states, spec, *others)  # type: ignore[arg-type]

    load_kernels()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_compile_graph", record)
    return asked


def entry_file(folder: Path, name: str) -> Path:
    """The cache's own file of what an artifact has."""
    data = (folder / "graphs" / name).read_bytes()
    suffix = Path(name).suffix
    (found,) = (path for path in CompileCache(CACHE_KIND).folder.glob(f"*/*{suffix}") if path.read_bytes() == data)
    return found


def test_what_is_broken_in_the_cache_is_compiled_again_and_nothing_else_and_no_native_code_is_stored(
    compiled: list[str], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    path = export_tiny(tiny_checkpoint, tmp_path / "first", target="cpu")
    before = folder_bytes(path / "graphs")
    assert sorted(compiled) == GRAPHS
    compiled.clear()
    entry_file(path, f"{GRAPHS[0]}.json").write_bytes(b"hostile")
    entry_file(path, f"{GRAPHS[1]}.json").unlink()
    for turn in ("second", "third"):
        again = export_tiny(tiny_checkpoint, tmp_path / turn, target="cpu")
        assert folder_bytes(again / "graphs") == before
        artifact_runner(again)
    assert sorted(compiled) == GRAPHS[:2]
    assert {path.suffix for path in (again / "graphs").iterdir()} <= {".json", ".safetensors"}


def test_decode_graphs_over_blocks_are_those_of_an_artifact_with_as_much_room_for_padding(
    compiled: list[str], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {"kv_block_size": 64, "sequence_length": 128, "context_buckets": (128,), "target": "cpu"}
    for name, chunk_size, decode_graphs in (("small", 8, 1), ("small again", 12, 0), ("large", 32, 1)):
        compiled.clear()
        path = export_tiny(tiny_checkpoint, tmp_path / name, prefill_chunk_size=chunk_size, **sizes)
        assert sum(graph.startswith("token_generation") for graph in compiled) == decode_graphs, name
        assert artifact_runner(path).config.prefill_chunk_size == chunk_size


def test_a_cache_that_others_may_write_to_stops_an_export_before_it_starts(
    compiled: list[str], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    CompileCache(CACHE_KIND).folder.chmod(0o777)
    with pytest.raises(PermissionError, match=r"can be changed by other users, and this process would run what it"):
        export_tiny(tiny_checkpoint, tmp_path / "out" / "artifact", target="cpu")
    assert not (tmp_path / "out").exists() and not compiled


@pytest.fixture
def empty_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has not loaded the kernels, and a cache without them."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    load_kernels.cache_clear()
    yield
    load_kernels.cache_clear()


@pytest.fixture
def source(empty_library: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only one of the kernels."""
    (tmp_path / "sources").mkdir()
    monkeypatch.setattr(native_build, "SOURCES", tmp_path / "sources")
    return tmp_path / "sources" / "source.cpp"


def test_kernels_are_built_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stubs = "".join(f'extern "C" long {name}() {{ return {native_build.INTERFACE}; }}\n' for name in FUNCTIONS)
    source.write_text(stubs, encoding="ascii")
    built: list[str] = []
    build = native_build.build

    def record(output: Path, *others: Any, **options: Any) -> None:
        built.append(output.name)
        build(output, *others, **options)

    monkeypatch.setattr(native_build, "build", record)
    for _ in range(2):
        load_kernels()
        load_kernels.cache_clear()
    assert built == ["kernels.so"]


def test_kernels_are_built_while_an_export_does_other_things(
    empty_library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever needs them waits for the one build, and gets its error."""
    begun, results = threading.Event(), queue.Queue[Any]()

    def build(*_: object) -> Any:
        begun.set()
        result = results.get(timeout=60)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(native_build, "load_library", build)
    for result in (RuntimeError("it does not compile"), "a library"):
        begun.clear()
        for _ in range(2):
            get_target("cpu").prepare()
        assert begun.wait(60)
        results.put(result)
        if isinstance(result, Exception):
            with pytest.raises(RuntimeError, match="it does not compile"):
                load_kernels()
    assert load_kernels() == load_kernels() == "a library" and results.empty()


def test_a_wheels_library_is_used_where_it_was_built_from_these_sources(
    empty_library: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = choose_instruction_set()
    sources = Path(shutil.copytree(native_build.SOURCES, tmp_path / "native"))
    monkeypatch.setattr(native_build, "SOURCES", sources)
    monkeypatch.setattr(native_build, "PREBUILT", tmp_path / "prebuilt")
    (tmp_path / "prebuilt").mkdir()
    prebuilt = tmp_path / "prebuilt" / native_build.name_prebuilt(chosen)
    (tmp_path / "stub.cpp").write_text('extern "C" long step_interface() { return 77; }', encoding="ascii")
    command = [str(native_build.find_compiler()), "-shared", "-fPIC", str(tmp_path / "stub.cpp"), "-o", str(prebuilt)]
    native_build._run_command(Processes(), command)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match="have the interface 77, and this version calls"):
        load_kernels()
    with (sources / "common" / "pool.h").open("a", encoding="ascii") as file:
        file.write("// changed")
    with pytest.raises(RuntimeError, match="has no kernels built from its sources"):
        load_kernels()


def test_a_library_is_for_one_machine_one_set_of_flags_and_sources_where_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = Path(shutil.copytree(native_build.SOURCES, tmp_path / "native"))
    monkeypatch.setattr(native_build, "SOURCES", sources)
    chosen = choose_instruction_set()
    others = replace(chosen, name="another"), replace(chosen, flags=("-mother",))
    digests = [native_build.digest_sources(each) for each in (chosen, *others)]
    monkeypatch.setattr(native_build.platform, "machine", lambda: "another")
    digests.append(native_build.digest_sources(chosen))
    monkeypatch.setattr(native_build.sys, "platform", "another")
    digests.append(native_build.digest_sources(chosen))
    (sources / "common" / "range.h").rename(sources / "map" / "range.h")
    digests.append(native_build.digest_sources(chosen))
    assert len(set(digests)) == 6


@pytest.mark.usefixtures("empty_library")
def test_without_a_compiler_an_export_says_so_before_it_starts(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    words = r"has no kernels built from its sources, and found no g\+\+ or clang\+\+ to build them; install"
    with pytest.raises(RuntimeError, match=words):
        export_tiny(tiny_checkpoint, tmp_path / "out" / "artifact", target="cpu")
    assert not (tmp_path / "out").exists()


def test_a_compiler_may_be_named_with_what_it_is_to_be_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stub.cpp").write_text("static_assert(ASKED == 3);", encoding="ascii")
    monkeypatch.setattr(native_build, "list_sources", lambda: [tmp_path / "stub.cpp"])
    monkeypatch.setenv("CXX", f"{native_build.find_compiler()} -DASKED=3")
    native_build.build(tmp_path / "stub.so", choose_instruction_set())
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    with pytest.raises(RuntimeError, match="CXX \\(now 'no-such-compiler -O3', which is no program here\\)"):
        native_build.check_compiler()


@pytest.mark.parametrize(
    ("text", "words"),
    [("int here( {", "expected"), ("int nowhere(); int here() { return nowhere(); }", "nowhere")],
    ids=["compiler", "linker"],
)
def test_kernels_that_do_not_compile_are_not_kept(text: str, words: str, source: Path, tmp_path: Path) -> None:
    source.write_text(text, encoding="ascii")
    with pytest.raises(RuntimeError, match=rf"failed on the CPU kernels:[\s\S]*{words}"):
        native_build.build(tmp_path / "kernels.so", choose_instruction_set())
    with pytest.raises(RuntimeError, match="failed on the CPU kernels"):
        load_kernels()
    assert not list((tmp_path / "cache").rglob("*.so"))
