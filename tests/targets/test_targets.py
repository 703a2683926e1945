# SPDX-License-Identifier: Apache-2.0
"""The cpu target computes what the eager one does, from one copy of the weights, with or without a compiler."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
from helpers import LENGTH, Opener, artifact_runner, export_tiny, forbidden, generate, python_process, random_tokens

from optimum_neuron.artifact.artifact import WEIGHTS_NAME, ArtifactError
from optimum_neuron.kernels.plan import Plan
from optimum_neuron.step.spec import SamplingParams
from optimum_neuron.targets import get_target, resolve_target
from optimum_neuron.targets.cpu import compiler, loader
from optimum_neuron.targets.cpu.executable import CpuExecutable


pytestmark = pytest.mark.slow

COMPILED = ("llama", "qwen3")
SAMPLED = SamplingParams(top_k=40, top_p=0.9, temperature=1.5)
PROMPT = random_tokens(21)
GENERATE = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import torch
import optimum_neuron.runtime.process
from helpers import artifact_runner, generate, random_tokens

def compute():
    return generate(artifact_runner(Path(sys.argv[1])), random_tokens(21), 8)[0]

torch.set_num_threads(2)
tokens = compute()
print(tokens, flush=True)
if not os.fork():
    signal.alarm(100)
    os._exit(3 if compute() == tokens else 4)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.fixture
def artifact(cpu_artifact: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(cpu_artifact("llama"), tmp_path / "artifact"))


@pytest.fixture(scope="module")
def expected(open_runner: Opener) -> list[int]:
    return generate(open_runner("llama"), PROMPT, 8)[0]


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


def test_loading_needs_no_compiler_and_a_forked_process_computes_with_threads_of_its_own(
    cpu_artifact: Callable[[str], Path], expected: list[int], tmp_path: Path
) -> None:
    helpers = Path(__file__).parents[1] / "helpers"
    process = python_process(GENERATE, cpu_artifact("llama"), helpers, PATH=str(tmp_path))
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    tokens, status = output.splitlines()[-2:]
    assert json.loads(tokens) == expected and status == "3", errors


def test_graphs_that_are_not_trusted_are_compiled_again(artifact: Path, expected: list[int]) -> None:
    for path in (artifact / "graphs").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    assert generate(artifact_runner(artifact, trust_native_code=False), PROMPT, 8)[0] == expected


def test_nothing_of_a_changed_artifact_is_executed(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "bind", forbidden)
    for name in ("graphs/mixed_chunk8_context64.json", "config.json", "tokenizer.json", WEIGHTS_NAME):
        path, whole = artifact / name, (artifact / name).read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        for trusted in (True, False) if name == WEIGHTS_NAME else (True,):
            with pytest.raises(ArtifactError, match=rf"{path.name} was changed after the export"):
                artifact_runner(artifact, trust_native_code=trusted)
        path.write_bytes(whole)


def test_weights_and_states_are_one_copy_for_all_graphs(
    cpu_artifact: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: dict[str, np.ndarray] = {}
    read_weights, allocate_states = loader.read_weights, loader.allocate_states

    def remember(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        bound.update(tensors)
        return dict(bound)

    monkeypatch.setattr(loader, "read_weights", lambda artifact: remember(read_weights(artifact)))
    monkeypatch.setattr(loader, "allocate_states", lambda specs: remember(allocate_states(specs)))
    runner = artifact_runner(cpu_artifact("llama"))
    _, logits = generate(runner, PROMPT, 2)
    assert bound["kv_cache.key_0"].any()
    assert np.array_equal(runner.executable.read_state("kv_cache.key_0"), bound["kv_cache.key_0"])
    bound["model.lm_head.weight"] *= 2
    _, doubled = generate(runner, PROMPT, 2)
    assert torch.equal(doubled, logits * 2)  # the first row is of the chunk graph, the second of the decode graph


def test_a_runner_that_is_dropped_gives_its_memory_back_at_once(cpu_artifact: Callable[[str], Path]) -> None:
    runner = artifact_runner(cpu_artifact("llama"))
    generate(runner, PROMPT, 2)
    executable = runner.executable
    assert isinstance(executable, CpuExecutable)
    plans = [weakref.ref(plan) for plan, _ in executable._plans.values()]
    gc.disable()  # what only the collector frees may be there for long, twice the weights of a next artifact
    try:
        del runner, executable
        assert [plan() for plan in plans] == [None] * len(plans)
    finally:
        gc.enable()


def test_a_graph_that_does_not_compile_is_named(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise ValueError("no such thing")

    monkeypatch.setenv("OPTIMUM_NEURON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "lower", fail)
    words = "graph token_generation_context64 could not be compiled: ValueError: no such thing"
    with pytest.raises(RuntimeError, match=words):
        export_tiny(tiny_checkpoint, tmp_path / "out" / "artifact", target="cpu")
    assert not list((tmp_path / "out").iterdir())
    # The kernels may be there: each process loads them once.
    assert not list((tmp_path / "cache").glob("*/.*")) and not list((tmp_path / "cache" / "cpu").rglob("*.json"))


def test_auto_is_the_cpu_and_unknown_targets_are_refused() -> None:
    assert resolve_target("auto") == "cpu" and resolve_target("eager") == "eager"
    with pytest.raises(ValueError, match=r"target='gpu' is not known; choose one of cpu, eager"):
        get_target("gpu")
