# SPDX-License-Identifier: Apache-2.0
"""Formats of quantized checkpoints: from a format's own tensors to `QuantizedWeight`, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .compressed_tensors import CompressedTensors
from .format import CheckpointFormat, TensorFiles
from .fp8 import Fp8, Mxfp4
from .gptq import Awq, Gptq
from .settings import Document, take_part, take_text


# Readers by the config's quant_method.
READERS: dict[str, Callable[[Document, TensorFiles], CheckpointFormat]] = {
    "awq": Awq, "compressed-tensors": CompressedTensors, "fp8": Fp8, "gptq": Gptq, "mxfp4": Mxfp4,
}  # fmt: skip
# Methods that transformers dequantizes too: a number and its scale have room in the types of exports.
DEQUANTIZED = ("fp8", "mxfp4")
# Wishes of a user: all codes of the checkpoint in the artifact, or plain weights.
KEEP, DEQUANTIZE = "keep", "dequantize"
_NAME = "quantization_config"
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")


def quantization_of(config: Mapping[str, Any], source: str) -> Document:
    """Return the quantization that a config.json names, empty for plain weights; raise ValueError if its format is not read."""
    parts = (config, *(config[name] for name in _TEXT_CONFIGS if isinstance(config.get(name), Mapping)))
    holder = next((each for each in parts if each.get(_NAME) is not None), None)
    if holder is None:
        return {}
    document = take_part(holder, _NAME)
    method = take_text(document, "quant_method", "")
    if method not in READERS:
        raise ValueError(
            f"{source} is quantized by {method or 'a method without a name'}, which is not read; export the checkpoint that it was "
            f"made from, a GGUF file, or one in {', '.join(READERS)}"
        )
    return {**document, "quant_method": method}


def open_quantized(config: Mapping[str, Any], folder: Path, source: str) -> CheckpointFormat:
    """Return the reader of a checkpoint by the quantization in its config.json; raise ValueError where they contradict each other."""
    document = quantization_of(config, source)
    return READERS[document["quant_method"]](document, TensorFiles(folder, source))
