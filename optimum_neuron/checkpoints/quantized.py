# SPDX-License-Identifier: Apache-2.0
"""What is done with a checkpoint whose weights are quantized: its codes are kept, or it is dequantized, or refused."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from transformers.quantizers import AutoQuantizationConfig

from .formats.find import EXACT


# A block of numbers and its scale are multiplied out; the product has room in the types that checkpoints are exported in.
DEQUANTIZED = ("fp8", "mxfp4")
# What may be asked for: to have all codes of the checkpoint in the artifact, or plain weights.
KEEP, DEQUANTIZE = "keep", "dequantize"


def check_quantized(config: PreTrainedConfig, source: str) -> None:
    """Raises ValueError where a config names a quantization that is not read."""
    method = quantization_method(config)
    if method is not None and method not in EXACT:
        raise ValueError(
            f"{source} is quantized ({method}); export the checkpoint that it was made from, a GGUF file, or one in {', '.join(EXACT)}"
        )


def dequantizing(config: PreTrainedConfig) -> Any | None:
    """What makes transformers dequantize the weights while it loads them; None where they are plain, or it cannot."""
    document = _document(config)
    if document is None or document.get("quant_method") not in DEQUANTIZED:
        return None
    return AutoQuantizationConfig.from_dict(document | {"dequantize": True})


def quantization_method(config: PreTrainedConfig) -> str | None:
    """The name of a config's quantization; None where it has none."""
    document = _document(config)
    return None if document is None else str(document.get("quant_method"))


def _document(config: PreTrainedConfig) -> dict[str, Any] | None:
    for part in (config, config.get_text_config(decoder=True)):
        found = getattr(part, "quantization_config", None)
        if found is not None:
            return dict(found) if isinstance(found, dict) else found.to_dict()
    return None
