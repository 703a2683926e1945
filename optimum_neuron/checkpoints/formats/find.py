# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint's config to the reader of its format; formats that have none are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .awq import Awq
from .compressed_tensors import CompressedTensors
from .format import CheckpointFormat
from .fp8 import Fp8
from .gptq import Gptq
from .mxfp4 import Mxfp4
from .settings import Document, text
from .tensors import TensorFiles


# What a weight that is read equals to the bit, in float32, by quant_method.
EXACT = {
    "awq": "(code - zero point) * scale",
    "compressed-tensors": "(code - zero point) * scale, which the library rounds to the type of the scale",
    "fp8": "code * scale of its block, as transformers dequantizes it",
    "gguf": "what gguf.quants.dequantize gives",
    "gptq": "(code - zero point) * scale",
    "mxfp4": "code * 2 ** exponent, as transformers dequantizes it",
}
_READERS: dict[str, Callable[[Document, TensorFiles], CheckpointFormat]] = {
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}
_CONFIGS = ("quantization_config", "compression_config")
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")


def find_quantized(config: Mapping[str, Any], folder: Path, source: str) -> CheckpointFormat | None:
    """The reader of a checkpoint in safetensors files; None where its config names no quantization.

    Args:
        config: the checkpoint's config.json.
        source: what the user named, for messages.

    Raises:
        ValueError: its format is not read, or the checkpoint contradicts its config or itself.
        FileNotFoundError: there are no weights.
    """
    document = _document(config)
    if document is None:
        return None
    method = text(document, "quant_method", "")
    if method not in _READERS:
        raise ValueError(
            f"{source} is quantized by {method or 'a method without a name'}, which is not read; export the checkpoint that it was "
            f"made from, or one in {', '.join(EXACT)}"
        )
    files = TensorFiles(folder, source)
    return _READERS[method](document, files)


def _document(config: Mapping[str, Any]) -> Document | None:
    parts = [config, *(config[name] for name in _TEXT_CONFIGS if isinstance(config.get(name), Mapping))]
    for part in parts:
        for name in _CONFIGS:
            document = part.get(name)
            if isinstance(document, Mapping):
                return document
            if document is not None:
                raise ValueError(f"config.json names {name}={document!r}, which is no object; correct it")
    return None
