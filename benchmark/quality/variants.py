# SPDX-License-Identifier: Apache-2.0
"""The exports that are compared: made, loaded one after another, and counted beside what transformers computes in float32."""

from __future__ import annotations

import gc
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from optimum_neuron import progress
from optimum_neuron.artifact.artifact import MANIFEST_NAME
from optimum_neuron.artifact.measurements import quality_follows_from
from optimum_neuron.config import ACTIVATIONS, DTYPES, KV_CACHE_DTYPES, NeuronConfig
from optimum_neuron.generate import NeuronModelForCausalLM
from optimum_neuron.options import INT4_GROUP_SIZES, QUANTIZATIONS

from ..machine import describe_machine
from ..model import default_model, export, load_transformers
from .figures import Counts, Figures
from .text import Texts, calibration_text, read_texts


# Rounded on a text that is not measured.
CALIBRATED = "calibrated"
# What else of an export a variant may name.
REFINEMENTS: dict[str, dict[str, Any]] = {
    "zero-point": {"quantization_zero_point": True},
    **{f"groups-{size}": {"quantization_group_size": size} for size in INT4_GROUP_SIZES},
    **{f"{kind}-activations": {"activations": kind} for kind in ACTIVATIONS},
    **{f"kv-{kind}": {"kv_cache_dtype": kind} for kind in KV_CACHE_DTYPES},
    CALIBRATED: {CALIBRATED: True},
}


@dataclass(frozen=True)
class Variant:
    """An export as it was named, what its figures follow from (`quality_follows_from`), and these."""

    name: str
    of: dict[str, Any]
    figures: Figures


@dataclass(frozen=True)
class Measured:
    """What one run of the benchmark tells."""

    model: str
    texts: Texts
    variants: list[Variant]
    machine: dict[str, Any]

    @property
    def tokens(self) -> int:
        return sum(len(ids) for ids in self.texts.ids)

    def to_dict(self) -> dict[str, Any]:
        """As JSON; a variant's record is complete in itself, so that an artifact may keep it."""
        of = {"reference": "transformers, float32", "text": self.texts.source, "text_sha256": self.texts.digest}
        return {
            "benchmark": "quality",
            "model": self.model,
            "tokens": self.tokens,
            "variants": [{"name": each.name, **each.of, **of, **each.figures.to_card()} for each in self.variants],
            "machine": self.machine,
        }


def measure_all(args: Namespace, folder: Path) -> Measured:
    """Runs every variant over the same texts.

    Args:
        folder: for exports.

    Raises:
        ValueError: a variant that is none, or that cannot score texts of this length.
    """
    model = default_model() if args.model is None else args.model
    options = [variant_options(name) for name in args.variants]  # before anything takes time
    calibrated = [each is not None and each.pop(CALIBRATED, False) for each in options]
    configs = [None if each is None else _config(args, each) for each in options]
    texts = read_texts(_tokenizer(model), args.texts, args.length)
    variants = []
    with tempfile.TemporaryDirectory() as scratch:
        reference = _write_reference(model, texts, Path(scratch))
        text = Path(scratch) / "calibration.txt"
        if any(calibrated):
            text.write_text(calibration_text(texts), encoding="utf-8")
        for name, config, is_calibrated in zip(args.variants, configs, calibrated, strict=True):
            own = text if is_calibrated else None
            path = Path(name) if config is None else export(_gguf_file(name) or model, config, folder, own).path
            with progress.stage(f"Measuring {name}"):
                variants.append(_measure(name, path, texts, reference))
            gc.collect()
    return Measured(Path(model).name, texts, variants, describe_machine())


def variant_options(name: str) -> dict[str, Any] | None:
    """Fields of NeuronConfig that a variant names, and whether it is `CALIBRATED`; None where it is an artifact's folder.

    Raises:
        ValueError: it names nothing that this version exports.
    """
    if (Path(name) / MANIFEST_NAME).is_file():
        return None
    dtypes = [each for each in DTYPES if each != "auto"]
    kinds = [each for each in QUANTIZATIONS if each != "checkpoint"]
    options: dict[str, Any] = {}
    for part in name.split("+"):
        is_file = part.endswith(".gguf") and Path(part).is_file()
        field = "dtype" if part in dtypes else "quantization"
        own = REFINEMENTS.get(part, {field: "checkpoint" if is_file else part})
        if own.keys() & options.keys() or not (is_file or part in (*dtypes, *kinds, *REFINEMENTS)):
            raise ValueError(
                f"variant {name!r} is no artifact's folder and nothing that this version exports; name one of {', '.join(dtypes)}, "
                f"{', '.join(kinds)}, both as in bfloat16+int8, a .gguf file, with them {', '.join(REFINEMENTS)}, or a folder with "
                f"{MANIFEST_NAME}"
            )
        options |= own
    if options.get(CALIBRATED) and options.get("quantization") != "int4":
        raise ValueError(
            f"variant {name!r} is rounded on a text, which is for int4; name it as in float32+int4+calibrated"
        )
    return options


def _gguf_file(name: str) -> str | None:
    """The file of a variant that is another runtime's quantization of the model."""
    return next((part for part in name.split("+") if part.endswith(".gguf")), None)


def _config(args: Namespace, options: dict[str, Any]) -> NeuronConfig:
    sizes = {"sequence_length": args.length + 1, "prefill_chunk_size": min(args.chunk_size, args.length)}
    return NeuronConfig.from_dict({**sizes, "prompt_logits": True, "target": args.target, **options})


def _tokenizer(model: str) -> Any:
    path = Path(model)
    if path.suffix == ".gguf":
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return AutoTokenizer.from_pretrained(model)


@torch.inference_mode()
def _write_reference(model: str, texts: Texts, folder: Path) -> list[Path]:
    """Logits of each text by transformers in float32, in files: together they may be more than memory."""
    loaded = load_transformers(model, "float32")
    paths = []
    with progress.stage("Running the float32 model", len(texts.ids)) as advance:
        for number, ids in enumerate(texts.ids):
            paths.append(folder / f"{number}.npy")
            np.save(paths[-1], loaded(ids[None], use_cache=False).logits[0].numpy(), allow_pickle=False)
            advance(paths[-1].name)
    return paths


def _measure(name: str, path: Path, texts: Texts, reference: list[Path]) -> Variant:
    model = NeuronModelForCausalLM.from_pretrained(path)
    counts = Counts()
    for ids, expected in zip(texts.ids, _read(reference), strict=True):
        counts.add(ids, model(ids[None]).logits[0], expected)
    return Variant(name, quality_follows_from(model.artifact), counts.figures())


def _read(paths: list[Path]) -> Iterator[Tensor]:
    for path in paths:
        yield torch.from_numpy(np.load(path, allow_pickle=False))
