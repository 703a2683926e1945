# SPDX-License-Identifier: Apache-2.0
"""What several test files share: the sizes of tiny graphs, runners over them, and greedy decoding by hand."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from filelock import FileLock
from hypothesis import settings
from torch import Tensor, nn

import optimum_neuron
from optimum_neuron.arrays import to_numpy, to_torch
from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.artifact.user_cache import CACHE_VARIABLE
from optimum_neuron.artifact.weights import read_weights
from optimum_neuron.checkpoints.checkpoint import Checkpoint
from optimum_neuron.config import NeuronConfig
from optimum_neuron.core import PromptPiece
from optimum_neuron.export.recipe import export_model
from optimum_neuron.parity.inspect import inspect_model
from optimum_neuron.runtime.prefill import prefill_prompts
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.runtime.step_tensors import DecodeRows
from optimum_neuron.runtime.timing import load_runner
from optimum_neuron.step.attention.kv_cache import KVCache
from optimum_neuron.step.family import GraphFamily
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.ops import EAGER_OPS, StepOps
from optimum_neuron.step.spec import GREEDY, GraphSpec, SamplingParams, graph_specs
from optimum_neuron.step.state_specs import state_specs
from optimum_neuron.step.step import StepModule, example_inputs
from optimum_neuron.targets import Executable
from optimum_neuron.targets.eager import EagerExecutable
from optimum_neuron.targets.host_states import allocate_places
from optimum_neuron.tools.certify import certify_export


# Dense, with sliding windows, with experts, with latent attention.
ARCHITECTURES = ("llama", "qwen3", "gemma2", "gpt_oss", "deepseek_v3")
# With convolutions too; those that are lowered to HLO by the full profile alone are marked.
LOWERED = [
    pytest.param(name, marks=[pytest.mark.full] if name in ("gemma2", "deepseek_v3") else [])
    for name in (*ARCHITECTURES, "lfm2")
]
VOCAB, LENGTH, CHUNK_SIZE = 300, 64, 8
# One context bucket and chunk size: a graph per kind, since each costs the cpu target seconds.
SIZES: dict[str, Any] = {
    "batch_size": 3,
    "sequence_length": LENGTH,
    "prefill_chunk_size": CHUNK_SIZE,
    "ctx_batch_size": 2,
    "context_buckets": (LENGTH,),
    "dtype": "float32",
    "output_logits": True,
    "activations": "none",  # the default follows the CPU
    "target": "eager",
}
# Compiled SmolLM2s, each of one size in all tests: float32 with room for prompts above 2,048 tokens, bfloat16 as in the demo.
SMOLLM2_SIZES: dict[str, dict[str, Any]] = {
    "float32": {"batch_size": 4, "sequence_length": 2304, "prefill_chunk_size": 128},
    "bfloat16": {"batch_size": 1, "sequence_length": 1024, "prefill_chunk_size": 64},
}
SMOLLM2_SIZES["float32"] |= {"output_logits": True, "activations": "none"}
TRASH_ROW = SIZES["batch_size"]
# From an architecture and a target to a runner with free slots: see conftest.py.
Opener = Callable[..., GraphRunner]
Artifacts = Callable[[str], Path]  # by architecture
Cli = Callable[..., tuple[Any, str, str]]  # from words to the exit code, stdout and stderr


def examples(count: int, **options: Any) -> settings:
    """How a property test is run: by `count` examples in the profile `full` (`make test-full`), else by a fourth of them."""
    full = settings.get_current_profile_name() == "full"
    return settings(max_examples=count if full else max(count // 4, 5), deadline=None, **options)


def forbidden(*_: object, **__: object) -> NoReturn:
    raise AssertionError("must not be called")


def tiny_config(**changes: Any) -> NeuronConfig:
    return NeuronConfig(**SIZES | changes)


def load_model(folder: Path) -> nn.Module:
    """A checkpoint in float32 with the cached attention, as an export loads it."""
    return Checkpoint(folder, None, str(folder), trust_remote_code=False).load_model("float32")


def as_tensor(array: np.ndarray) -> Tensor:
    """A copy of an array, which the next run leaves alone."""
    return to_torch(array.copy())


def read_state(executable: Executable, name: str) -> Tensor:
    return to_torch(executable.read_state(name))


def write_state(executable: Executable, name: str, state: Tensor) -> None:
    executable.write_state(name, to_numpy(state))


def run_tensors(executable: Executable, graph: str, inputs: Sequence[Tensor]) -> list[Tensor]:
    return [to_torch(each) for each in executable.run(graph, [to_numpy(each) for each in inputs])]


def weights_of(artifact: Artifact) -> dict[str, Tensor]:
    """What `read_weights` gives, tied names as one tensor."""
    arrays = read_weights(artifact)
    tensors = {id(each): to_torch(each) for each in arrays.values()}
    return {name: tensors[id(each)] for name, each in arrays.items()}


class Recorder(Executable):
    """An executable that keeps the inputs of each run and returns zeros."""

    def __init__(self, graphs: Sequence[GraphSpec]) -> None:
        self.specs = {graph.name: graph for graph in graphs}
        self.runs: list[tuple[GraphSpec, dict[str, Tensor]]] = []

    def run(self, graph: str, inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        spec = self.specs[graph]
        assert [tuple(tensor.shape) for tensor in inputs] == [tensor.shape for tensor in spec.inputs()]
        names = [tensor.name.split(".")[1] for tensor in spec.inputs()]
        self.runs.append((spec, {name: as_tensor(each) for name, each in zip(names, inputs, strict=True)}))
        return [np.zeros(output.shape, output.dtype) for output in spec.outputs(VOCAB)]


def eager_runner(
    model: nn.Module,
    config: NeuronConfig,
    *,
    deterministic: bool = False,
    ops: StepOps = EAGER_OPS,
    spec: ModelSpec | None = None,
) -> GraphRunner:
    """Step modules without an artifact; `spec` is what inspect_model finds, where a test has it already."""
    model_spec = spec or inspect_model(model)
    cache = KVCache(state_specs(config, model_spec))
    graphs = graph_specs(config)
    steps = {spec.name: StepModule(model, cache, spec, ops).eval() for spec in graphs}
    executable = EagerExecutable(steps, cache, allocate_places(config, model_spec))
    return GraphRunner(executable, config, graphs, model_spec, deterministic=deterministic)


def export_tiny(
    checkpoint: Path,
    output: Path,
    *,
    overwrite: bool = False,
    certificate: bool = False,
    dequantize: bool = False,
    **changes: Any,
) -> Path:
    """Of processes that export the same to the same cache, one compiles and the others find it there."""
    config = tiny_config(**changes)
    lock: AbstractContextManager[object] = nullcontext()
    if config.target == "cpu":
        described = checkpoint if checkpoint.is_file() else checkpoint / "config.json"
        what = hashlib.sha256(described.read_bytes() + repr(config).encode()).hexdigest()
        lock = FileLock(f"{os.environ[CACHE_VARIABLE]}-{what[:16]}.lock")
    options = {"overwrite": overwrite, "certify": certify_export if certificate else None, "dequantize": dequantize}
    with lock:
        return export_model(checkpoint, output, config=config, **options)


def artifact_runner(path: Path, *, trust_native_code: bool = True) -> GraphRunner:
    return load_runner(Artifact.open(path), trust_native_code=trust_native_code)


def random_tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCAB, count).astype(np.int32)


def prefill_pieces(runner: GraphRunner, slot: int, prompt: np.ndarray, pieces: Sequence[int]) -> Tensor:
    """Prefills a prompt in chunks of the given sizes; returns the logits after its last token."""
    assert sum(pieces) == len(prompt)
    start, logits = 0, torch.empty(0)
    for count in pieces:
        output = runner.run_step([PromptPiece(slot, prompt[start : start + count])])
        assert output.chunk_logits is not None
        logits = as_tensor(output.chunk_logits[0])
        start += count
    return logits


def decode_rows(
    runner: GraphRunner, tokens: dict[int, int], sampling: SamplingParams = GREEDY, uniform: float = 0.0
) -> DecodeRows:
    """Decode rows of one step: slot to the token that it processes."""
    slots = runner.config.batch_size
    token_ids, active = np.zeros(slots, dtype=np.int32), np.zeros(slots, dtype=bool)
    for slot, token in tokens.items():
        token_ids[slot], active[slot] = token, True
    rows = np.tile(np.asarray(sampling, dtype=np.float32), (slots, 1))
    return DecodeRows(token_ids, active, rows, np.full(slots, uniform, dtype=np.float32))


def decode_tokens(
    runner: GraphRunner, tokens: dict[int, int], sampling: SamplingParams = GREEDY, uniform: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Advances the named slots by one token each; returns the tokens and logits of all slots."""
    output = runner.run_step((), DecodeRows(*decode_rows(runner, tokens, sampling, uniform)))
    assert output.decode_tokens is not None and output.decode_logits is not None
    return as_tensor(output.decode_tokens), as_tensor(output.decode_logits)


def generate(
    runner: GraphRunner,
    prompt: np.ndarray,
    new_tokens: int,
    sampling: SamplingParams = GREEDY,
    uniforms: Sequence[float] | None = None,
) -> tuple[list[int], Tensor]:
    """Runs one request in slot 0; returns its tokens and logits `[new_tokens, vocab]` that they come from."""
    draws = [0.0] * new_tokens if uniforms is None else uniforms
    runner.reset_slots()
    first, logits = prefill_prompts(runner, [prompt], sampling, np.asarray(draws[:1], dtype=np.float32))
    assert first is not None and logits is not None
    tokens, steps = [int(first[0])], [as_tensor(logits[0])]
    for draw in draws[1:]:
        chosen, rows = decode_tokens(runner, {0: tokens[-1]}, sampling, draw)
        tokens.append(int(chosen[0]))
        steps.append(rows[0])
    return tokens, torch.stack(steps)


def state_names(runner: GraphRunner, model: ModelSpec) -> list[str]:
    return [state.name for state in state_specs(runner.config, model)]


def read_states(runner: GraphRunner, model: ModelSpec) -> dict[str, Tensor]:
    return {name: read_state(runner.executable, name) for name in state_names(runner, model)}


def fill_rows(runner: GraphRunner, model: ModelSpec, rows: Sequence[int], value: float | None) -> None:
    """Overwrites whole cache rows: with a value, or with random numbers where it is None."""
    for name in state_names(runner, model):
        state = read_state(runner.executable, name)
        state[list(rows)] = torch.randn_like(state[list(rows)]) if value is None else value
        write_state(runner.executable, name, state)


def same_states(left: dict[str, Tensor], right: dict[str, Tensor], rows: Sequence[int], stop: int = LENGTH) -> bool:
    """Whether two snapshots hold the same bits in some rows' first `stop` columns; NaN equals NaN."""
    parts = [{name: each[name][list(rows), :, :stop].view(torch.int32) for name in left} for each in (left, right)]
    return all(torch.equal(parts[0][name], parts[1][name]) for name in left)


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Every file below a folder by its name, hidden ones included."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def mixed_spec(config: NeuronConfig) -> GraphSpec:
    """A graph with decode and chunk rows at once, at the largest sizes of a config."""
    return GraphFamily(graph_specs(config)).kind("mixed")[-1]


def step_inputs(
    spec: GraphSpec, decode: dict[int, tuple[int, int]], chunks: dict[int, tuple[int, np.ndarray]]
) -> list[Tensor]:
    """Inputs of one step by hand: `decode` is slot to position and token, `chunks` slot to start and tokens."""
    inputs = dict(zip((tensor.name for tensor in spec.inputs()), example_inputs(spec.inputs()), strict=True))
    for group in {name.split(".")[0] for name in inputs}:
        inputs[f"{group}.position_ids"].fill_(-1)
    for slot, (position, token) in decode.items():
        inputs["decode.position_ids"][slot, 0] = position
        inputs["decode.input_ids"][slot, 0] = token
    for row, (slot, (start, tokens)) in enumerate(chunks.items()):
        columns = np.minimum(np.arange(spec.chunk_size), len(tokens) - 1)
        inputs["chunk.input_ids"][row] = torch.from_numpy(tokens[columns])
        inputs["chunk.position_ids"][row] = torch.from_numpy(start + columns)
        inputs["chunk.seq_ids"][row] = slot
    return list(inputs.values())


def python_process(script: str, *arguments: str | Path, **variables: str) -> subprocess.Popen[str]:
    """Starts a script in a process of its own, the package importable; `variables` change its environment."""
    environment = os.environ | {"PYTHONPATH": str(Path(optimum_neuron.__file__).parents[1])} | variables
    command = [sys.executable, "-c", script, *map(str, arguments)]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, **pipes, text=True, env=environment)


def reuse_prefix(runner: GraphRunner, slot: int, source: int, length: int, snapshot: int | None = None) -> None:
    """Make a slot hold the first tokens of another one, or of itself."""
    if source != slot:
        runner.copy_block(source, slot, length)
    runner.resume_slot(slot, length, snapshot)
