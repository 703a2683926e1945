# SPDX-License-Identifier: Apache-2.0
"""Compiling HLO with neuronx-cc: the options, the cache, and what is left when it goes wrong."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes.graphs import copy_graph, step_graph
from fakes.tools import NeuronTools, Sdk
from lowered import lower_module
from torch import Tensor, nn

import optimum_neuron.version
from optimum_neuron.targets.neuron.compile import compiler
from optimum_neuron.targets.neuron.compile.compiler import compile_graphs
from optimum_neuron.targets.neuron.compile.neuron_cc import compiler_version, find_compiler, list_operators
from optimum_neuron.targets.neuron.graphs.io import LoweredGraph
from optimum_neuron.targets.neuron.sdk.errors import COMPILER_RULES, explain_failure


pytest_plugins = ("fakes.plugin",)
NEW, OLD = "2.27.5334.0+f702b353", "2.26.6360.0"


@pytest.fixture(autouse=True)
def fresh_answers() -> None:
    """What a compiler said once is remembered by its path, which tests use again."""
    compiler_version.cache_clear()
    list_operators.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "graphs").mkdir()
    return tmp_path / "graphs"


def test_graphs_are_compiled_in_folders_of_their_own_and_recorded(neuron_tools: NeuronTools, folder: Path) -> None:
    graphs = [step_graph(), step_graph("mixed"), copy_graph()]
    record = compile_graphs(graphs, "trn2", folder)
    assert sorted(path.name for path in folder.iterdir()) == ["copy_slot.neff", "mixed.neff", "token_generation.neff"]
    assert record["target"] == "trn2" and record["lnc"] == 2
    assert record["versions"] == {"neuronx-cc": NEW}
    assert record["graphs"]["token_generation"]["argv"] == [
        "neuronx-cc", "compile", "token_generation.hlo", "--framework=XLA", "--target=trn2",
        "--output=token_generation.neff", "--logfile=compiler.log", "--model-type=transformer", "--auto-cast=none", "-O2",
        "--tensorizer-options=--enable-ccop-compute-overlap --cc-pipeline-tiling-factor=1 --vectorize-strided-dma",
        "--internal-hlo2tensorizer-options=--verify-hlo=true", "--lnc=2", "--native-int64=disabled", "--implicit-integer-downcast=all",
    ]  # fmt: skip
    calls = neuron_tools.calls()
    assert sorted(call["argv"][1] for call in calls) == ["copy_slot.hlo", "mixed.hlo", "token_generation.hlo"]
    assert all(call["argv"] == record["graphs"][call["graph"]]["argv"][1:] for call in calls)
    assert len({call["cwd"] for call in calls}) == 3
    # Nothing of the compiler is left: neither what it wrote where it ran nor its temporary files.
    assert not any(Path(call["cwd"]).exists() or Path(call["environment"]["TMPDIR"]).exists() for call in calls)
    assert json.dumps(record)


def test_lnc_and_flags_come_from_the_environment_and_an_old_compiler_gets_no_options_that_it_does_not_know(
    neuron_tools: NeuronTools, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in {
        "NEURON_LOGICAL_NC_CONFIG": "1", "NEURON_CC_FLAGS": "-O1 --verbose=35", "NEURON_CC_FLAGS_TOKEN_GENERATION": "-O3",
        "FAKE_NCC_VERSION": OLD,
    }.items():  # fmt: skip
        monkeypatch.setenv(variable, value)
    record = compile_graphs([step_graph()], "trn2", folder)
    argv = record["graphs"]["token_generation"]["argv"]
    assert record["lnc"] == 1 and record["versions"] == {"neuronx-cc": OLD}
    assert "--lnc=1" in argv and "-O3" in argv and "-O2" not in argv and argv[-1] == "--verbose=35"
    assert not any("int64" in argument for argument in argv)
    # The compiler gets them once: as arguments.
    assert not [name for name in neuron_tools.calls()[0]["environment"] if name.startswith("NEURON_CC_FLAGS")]


def test_a_cached_graph_is_not_compiled_again(
    neuron_tools: NeuronTools, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = step_graph()
    first = compile_graphs([graph, copy_graph()], "trn2", folder)
    again = folder.with_name("again")
    again.mkdir()
    # Names of weights, the folder and the version of this package are no part of it.
    weights = tuple(replace(each, name=f"other.{each.name}") for each in graph.io.inputs)
    other = replace(graph, io=replace(graph.io, inputs=weights, spec={"batch_size": 3}))
    monkeypatch.setattr(optimum_neuron.version, "__version__", "99.0")
    monkeypatch.chdir(again)
    assert compile_graphs([other, copy_graph()], "trn2", again) == first
    assert len(neuron_tools.calls()) == 2
    assert (again / "copy_slot.neff").read_bytes() == (folder / "copy_slot.neff").read_bytes()
    # Another graph, target, option or compiler is another entry.
    compile_graphs([step_graph(size=3)], "trn2", again)
    compile_graphs([step_graph()], "trn3", again)
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O3")
    compile_graphs([step_graph()], "trn2", again)
    monkeypatch.delenv("NEURON_CC_FLAGS")
    with monkeypatch.context() as patch:
        patch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
        compile_graphs([step_graph()], "trn2", again)
    compiler_version.cache_clear()
    monkeypatch.setenv("FAKE_NCC_VERSION", "2.28.1.0+1")
    compile_graphs([step_graph()], "trn2", again)
    assert len(neuron_tools.calls()) == 7


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("EVRF009", r"status 70: NCC_EVRF009: the graph's tensors exceed the memory of a core; lower batch_size"),
        ("EVRF029", r"NCC_EVRF029: a sort is not supported on this target; optimum-cli neuron lint names the module"),
        ("IINAR001", r"NCC_IINAR001: the compiler failed in its own code; report it to AWS"),
        ("EXYZ999", r"NCC_EXYZ999: the compiler refused the graph"),
        ("no-output", r"the compiler reported success, but wrote no token_generation\.neff"),
        ("short", r"token_generation\.neff has 4 bytes, fewer than a NEFF's header"),
        ("memory", r"status -9: it was killed, which is how Linux ends a process when memory runs out"),
        ("die", r"status -6: it was aborted by a defect of its own"),
        ("disk", r"the disk is full; free space, or set TMPDIR and OPTIMUM_NEURON_CACHE"),
    ],
)
def test_a_failed_compilation_names_graph_rule_and_remedy(
    neuron_tools: NeuronTools, folder: Path, fault: str, message: str
) -> None:
    neuron_tools.break_compiler(token_generation=fault)
    with pytest.raises(RuntimeError, match=r"graph token_generation could not be compiled: .*" + message):
        compile_graphs([step_graph("mixed"), step_graph()], "trn2", folder)
    _assert_nothing_left(folder)


class _Choice(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(shape))

    def forward(self, index: Tensor) -> tuple[Tensor]:
        return (self.get_buffer("weight").index_select(0, index),)


def test_matrices_of_a_weight_that_a_step_chooses_need_an_option_of_trn1_and_rows_need_none() -> None:
    for shape, expected in (((6, 2), False), ((6, 2, 2), True)):
        graph = lower_module(_Choice(*shape), {"x": torch.zeros(1, dtype=torch.int32)})
        flags = compiler._make_job(graph, "trn1", 1, OLD).arguments
        assert (" --internal-enable-dge-levels vector_dynamic_offsets " in " ".join(flags)) == expected


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"every": "hang"}, r"did not finish within 4 s and was ended; lower prefill_chunk_size"),
        ({"mixed": "EOOM001 late", "every": "hang"}, r"graph mixed could not be compiled: .*NCC_EOOM001"),
    ],
)
def test_one_that_takes_too_long_and_the_others_of_one_that_fails_are_ended_with_their_children(
    faults: dict[str, str], message: str, neuron_tools: NeuronTools, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "COMPILE_TIMEOUT", 4.0 if len(faults) == 1 else 60.0)
    monkeypatch.setattr(compiler, "parallel_jobs", lambda jobs, memory: jobs)
    neuron_tools.break_compiler(**faults)
    graphs = [step_graph()] if len(faults) == 1 else [step_graph(), step_graph("mixed"), copy_graph()]
    with pytest.raises(RuntimeError, match=message):
        compile_graphs(graphs, "trn2", folder)
    _assert_ended(neuron_tools)
    _assert_nothing_temporary(neuron_tools)
    _assert_nothing_left(folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_ended_export_leaves_nothing_running(
    neuron_tools: NeuronTools, folder: Path, number: signal.Signals
) -> None:
    """Only an interrupt lets it clean up as well; after the others, the next one does."""
    neuron_tools.break_compiler(every="hang")
    graphs = [step_graph()]
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
        try:
            compile_graphs(graphs, "trn2", folder)
        except KeyboardInterrupt:
            os._exit(3)
        finally:
            os._exit(4)
    _wait_for(lambda: _pids(neuron_tools) != [])
    os.kill(child, number)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _assert_ended(neuron_tools)
    if number == signal.SIGINT:
        assert ended == 3
        _assert_nothing_temporary(neuron_tools)
    else:
        assert ended == -number
        for call in neuron_tools.calls():
            shutil.rmtree(call["environment"]["TMPDIR"], ignore_errors=True)
        neuron_tools.break_compiler()
        compile_graphs(graphs, "trn2", folder)
        (folder / "token_generation.neff").unlink()
    _assert_nothing_left(folder)


def test_a_broken_entry_is_compiled_again(neuron_tools: NeuronTools, folder: Path) -> None:
    compile_graphs([step_graph()], "trn2", folder)
    whole = (folder / "token_generation.neff").read_bytes()
    (neff,) = (folder.parent / "cache" / "neuron").glob("*/*.neff")
    neff.write_bytes(whole[:-1])
    compile_graphs([step_graph()], "trn2", folder)
    assert (folder / "token_generation.neff").read_bytes() == whole == neff.read_bytes()
    assert len(neuron_tools.calls()) == 2


def test_a_full_disk_is_told_with_the_folder(
    neuron_tools: NeuronTools, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(graph: LoweredGraph, folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(compiler, "write_graph", full)
    with pytest.raises(OSError, match=r"no space is left on the disk of .*cache/neuron; free some, or set OPTIMUM_NE"):
        compile_graphs([step_graph()], "trn2", folder)
    _assert_nothing_left(folder)


def test_the_compiler_is_asked_for_version_and_operators(neuron_tools: NeuronTools) -> None:
    path = find_compiler()
    assert path == neuron_tools.folder / "neuronx-cc" and compiler_version(path) == NEW
    assert {"Dot", "Scatter"} <= list_operators(path)
    compiler_version.cache_clear()
    path.write_text("#!/bin/sh\necho wrong package >&2\nexit 1\n")
    with pytest.raises(RuntimeError, match=r"neuronx-cc --version ended with status 1: wrong package"):
        compiler_version(path)


def test_without_a_compiler_the_message_says_what_to_install(neuron_sdk: Sdk, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = neuron_sdk(None)
    (tools.folder / "neuronx-cc").unlink()
    told = r"compiling for trn2 .* neuronx-cc is not installed; install it from the Neuron repository"
    with pytest.raises(RuntimeError, match=told):
        compiler.check_environment("trn2")
    # A placeholder of the same name is installed: that is another sentence.
    neuron_sdk(None, "placeholder")
    with pytest.raises(RuntimeError, match=r"neuronx-cc is installed, but there is no neuronx-cc command"):
        compiler.check_environment("trn3")


def test_every_documented_code_has_rule_and_remedy() -> None:
    assert len(COMPILER_RULES) > 55
    assert all(rule and remedy for rule, remedy in COMPILER_RULES.values())
    assert explain_failure(1, "no code here") == "the compiler ended with status 1\nno code here"
    assert explain_failure(1, "NCC_EVRF009 and NCC_EVRF009").count("NCC_EVRF009: ") == 1


def _pids(tools: NeuronTools) -> list[int]:
    path = tools.log.with_suffix(".pids")
    return [int(pid) for pid in path.read_text().split()] if path.is_file() else []


def _assert_nothing_temporary(tools: NeuronTools) -> None:
    assert not any(Path(call["environment"]["TMPDIR"]).exists() for call in tools.calls())


def _assert_ended(tools: NeuronTools) -> None:
    assert len(_pids(tools)) >= 2
    _wait_for(lambda: not any(map(_is_alive, _pids(tools))))


def _is_alive(pid: int) -> bool:
    """A zombie whose new parent has not looked yet is no process any more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _assert_nothing_left(folder: Path) -> None:
    """But whole graphs: a failed export's folder is removed."""
    assert not [path for path in folder.iterdir() if path.name != "mixed.neff"]
    cache = folder.parent / "cache" / "neuron"
    assert not list(cache.glob(".*")), "work folders of compilations"
