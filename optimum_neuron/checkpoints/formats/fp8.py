# SPDX-License-Identifier: Apache-2.0
"""FP8 checkpoints as DeepSeek-V3 has them: e4m3 weights with a scale for each block of outputs and inputs, or one for all.

`weight_scale_inv` multiplies codes, as in `weight_dequant` of DeepSeek-V3's inference/kernel.py and in transformers' `Fp8Dequantize`. A
block that reaches over the weight's edge has its scale too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .format import SafetensorsFormat
from .mxfp4 import power_of_two
from .settings import Document, block_of, take_text
from .stored import FormatWeight
from .tensors import DOWNLOAD, FLOATS, TensorFiles


CODES = "F8_E4M3"
# Names of the scale of `x.weight` or `x.gate_up_proj`.
_SCALES = ("{weight}_scale_inv", "{module}.scale", "{weight}_scale")
# Scales of inputs, which stay unquantized.
_OF_INPUTS = ("activation_scale", "input_scale")
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)


class Fp8(SafetensorsFormat):
    """A checkpoint with quant_method "fp8" in its config."""

    def __init__(self, document: Document, files: TensorFiles) -> None:
        self._block = _block_size(document)
        static = take_text(document, "activation_scheme", "dynamic") == "static"
        left_out = tuple(name for name in files.names if name.endswith(_OF_INPUTS))
        coded = [name for name in sorted(files.names) if files.dtype(name) == CODES]
        parts = {name: {"codes": name, "scale": _scale_of(name, files)} for name in coded}
        used = {tensors["scale"] for tensors in parts.values()}
        scales = (name for name in files.names if name.endswith(("_scale_inv", "weight_scale")))
        alone = next((name for name in scales if name not in used), None)
        if alone is not None:
            raise ValueError(f"{files.source} holds {alone}, and no FP8 weight that it belongs to; {DOWNLOAD}")
        super().__init__(
            files, parts, left_out=left_out, notices=(inputs_notice(files.source),) if static or left_out else ()
        )

    def _stored_weight(self, name: str) -> FormatWeight:
        parts = self._parts[name]
        codes = self._files.read_tensor(parts["codes"], torch.float8_e4m3fn)
        found = self._files.read_tensor(parts["scale"], *FLOATS, *_EXPONENTS)
        if found.dtype in _EXPONENTS:
            found = power_of_two(f"{self._files.source}: {parts['scale']}", found)
        # A table of embeddings may have one scale where layers have blocks.
        block = None if found.numel() == 1 and found.dim() < 2 else self._block
        scale, group = spread_scales(f"{self._files.source}: {parts['scale']}", found, codes.shape, block)
        return FormatWeight(f"{self._files.source}: {name}", "fp8", codes, scale, group=group)


def spread_scales(
    name: str, scale: Tensor, shape: Sequence[int], block: tuple[int, int] | None
) -> tuple[Tensor, Tensor | None]:
    """Return scales of blocks as scales `[..., outputs, groups]` of a weight `shape`, and the group of each input.

    Args:
        block: outputs and inputs of a block; None for one scale for all, for an expert, or for each output.

    Raises:
        ValueError: there are not as many as there are blocks.
    """
    *experts, outputs, inputs = shape
    if block is None:
        rows = scale.reshape((1,) * len(shape)).expand(*experts, 1, 1) if scale.numel() == 1 else scale
        while rows.dim() < len(shape):
            rows = rows[..., None]
        # One for an expert's gate and one for its projection up are the only scales between these.
        fits = rows.shape[-2] in (1, outputs) or (experts and rows.shape[-2] == 2 and outputs % 2 == 0)
        if list(rows.shape[:-2]) != experts or rows.shape[-1] != 1 or not fits:
            raise ValueError(
                f"{name} has the shape {list(scale.shape)}, which fits no weight {list(shape)}; {DOWNLOAD}"
            )
        return rows.repeat_interleave(outputs // rows.shape[-2], -2), None
    wanted = [*experts, -(-outputs // block[0]), -(-inputs // block[1])]
    if list(scale.shape) != wanted:
        raise ValueError(
            f"{name} has the shape {list(scale.shape)}, and a weight {list(shape)} in blocks of {list(block)} has scales {wanted}; "
            f"{DOWNLOAD}"
        )
    rows = scale.repeat_interleave(block[0], -2)[..., :outputs, :]
    return rows, torch.arange(inputs) // block[1]


def inputs_notice(source: str) -> str:
    return f"{source} also asks for quantized inputs of its layers; they stay as they are"


def _block_size(document: Document) -> tuple[int, int] | None:
    block = document.get("weight_block_size")
    return None if block is None else block_of(block, "quantization_config names weight_block_size")


def _scale_of(name: str, files: TensorFiles) -> str:
    module = name.rpartition(".")[0]
    found = [scale.format(weight=name, module=module) for scale in _SCALES]
    found = [scale for scale in found if scale in files.names]
    if len(found) != 1:
        scales = " and ".join(found) if found else f"no {name}_scale_inv"
        raise ValueError(f"{files.source} holds {name} in FP8 and {scales}; {DOWNLOAD}")
    return found[0]
