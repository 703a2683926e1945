# SPDX-License-Identifier: Apache-2.0
"""Quantized checkpoints: those that transformers turns into plain weights without loss, and the refusal of all others."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from transformers.quantizers import AutoQuantizationConfig


# A block of numbers and its scale are multiplied out; the product has room in the types that checkpoints are exported in.
DEQUANTIZED = ("fp8", "mxfp4")


def refuse_quantized(config: PreTrainedConfig, source: str) -> None:
    """Raises ValueError where a config asks for a quantization whose weights cannot be made plain."""
    document = _document(config)
    if document is not None and document.get("quant_method") not in DEQUANTIZED:
        raise ValueError(
            f"{source} is quantized ({document.get('quant_method')}); export an unquantized or a GGUF checkpoint "
            f"(dequantized are {', '.join(DEQUANTIZED)} and GGUF)"
        )


def dequantizing(config: PreTrainedConfig) -> Any | None:
    """What makes transformers dequantize the weights while it loads them; None where they are plain."""
    document = _document(config)
    if document is None or document.get("quant_method") not in DEQUANTIZED:
        return None
    return AutoQuantizationConfig.from_dict(document | {"dequantize": True})


def _document(config: PreTrainedConfig) -> dict[str, Any] | None:
    for part in (config, config.get_text_config(decoder=True)):
        found = getattr(part, "quantization_config", None)
        if found is not None:
            return dict(found) if isinstance(found, dict) else found.to_dict()
    return None
