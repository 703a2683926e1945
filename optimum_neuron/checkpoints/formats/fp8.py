# SPDX-License-Identifier: Apache-2.0
"""FP8 checkpoints as DeepSeek-V3 has them, and MXFP4 checkpoints as gpt-oss has them: codes of floats with scales of blocks.

FP8: `weight_scale_inv` multiplies codes, as in `weight_dequant` of DeepSeek-V3's inference/kernel.py and in transformers' `Fp8Dequantize`. A
block that reaches over the weight's edge has its scale too. MXFP4: the layout is that of transformers' `convert_moe_packed_tensors`, the format
that of https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .format import FLOATS, SafetensorsFormat, TensorFiles
from .settings import Document, block_of, take_text
from .stored import DOWNLOAD, FormatWeight


# Names of the scale of `x.weight` or `x.gate_up_proj`.
_SCALES = ("{weight}_scale_inv", "{module}.scale", "{weight}_scale")
# Scales of inputs, which stay unquantized.
_OF_INPUTS = ("activation_scale", "input_scale")
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
_MXFP4_PARTS = ("blocks", "scales")
_MXFP4_BYTES = 16


class Fp8(SafetensorsFormat):
    """A checkpoint with quant_method "fp8": e4m3 weights with a scale for each block of outputs and inputs, or one for all."""

    def __init__(self, document: Document, files: TensorFiles) -> None:
        block = document.get("weight_block_size")
        self._block = None if block is None else block_of(block, "quantization_config names weight_block_size")
        static = take_text(document, "activation_scheme", "dynamic") == "static"
        left_out = tuple(name for name in files.names if name.endswith(_OF_INPUTS))
        parts = {}
        for name in sorted(files.names):
            if files.dtype(name) == "F8_E4M3":
                module = name.rpartition(".")[0]
                found = [scale.format(weight=name, module=module) for scale in _SCALES]
                found = [scale for scale in found if scale in files.names]
                if len(found) != 1:
                    scales = " and ".join(found) if found else f"no {name}_scale_inv"
                    raise ValueError(f"{files.source} holds {name} in FP8 and {scales}; {DOWNLOAD}")
                parts[name] = {"codes": name, "scale": found[0]}
        used = {tensors["scale"] for tensors in parts.values()}
        scales_there = (name for name in files.names if name.endswith(("_scale_inv", "weight_scale")))
        alone = next((name for name in scales_there if name not in used), None)
        if alone is not None:
            raise ValueError(f"{files.source} holds {alone}, and no FP8 weight that it belongs to; {DOWNLOAD}")
        notices = (inputs_notice(files.source),) if static or left_out else ()
        super().__init__(files, parts, left_out=left_out, notices=notices)

    def _stored_weight(self, name: str) -> FormatWeight:
        parts = self._parts[name]
        codes = self._files.read_tensor(parts["codes"], torch.float8_e4m3fn)
        found = self._files.read_tensor(parts["scale"], *FLOATS, *_EXPONENTS)
        where = f"{self._files.source}: {parts['scale']}"
        if found.dtype in _EXPONENTS:
            found = _power_of_two(where, found)
        # A table of embeddings may have one scale where layers have blocks.
        block = None if found.numel() == 1 and found.dim() < 2 else self._block
        scale, group = spread_scales(where, found, codes.shape, block)
        return FormatWeight(f"{self._files.source}: {name}", "fp8", codes, scale, group=group)


def spread_scales(
    name: str, scale: Tensor, shape: Sequence[int], block: tuple[int, int] | None
) -> tuple[Tensor, Tensor | None]:
    """Return scales `[..., outputs, groups]` of a weight `shape`, and the group of each input; raise ValueError where their number is wrong.

    A block has outputs and inputs; None is one scale for all, for an expert, or for each output.
    """
    *experts, outputs, inputs = shape
    if block is None:
        rows = scale.reshape((1,) * len(shape)).expand(*experts, 1, 1) if scale.numel() == 1 else scale
        while rows.dim() < len(shape):
            rows = rows[..., None]
        # One for an expert's gate and one for its projection up are the only scales between these.
        fits = rows.shape[-2] in (1, outputs) or (experts and rows.shape[-2] == 2 and outputs % 2 == 0)
        if list(rows.shape[:-2]) != experts or rows.shape[-1] != 1 or not fits:
            raise ValueError(f"{name} has the shape {list(scale.shape)}, which fits no {list(shape)}; {DOWNLOAD}")
        return rows.repeat_interleave(outputs // rows.shape[-2], -2), None
    wanted = [*experts, -(-outputs // block[0]), -(-inputs // block[1])]
    if list(scale.shape) != wanted:
        raise ValueError(
            f"{name} has the shape {list(scale.shape)}, and a weight {list(shape)} by {list(block)} has scales {wanted}; {DOWNLOAD}"
        )
    return scale.repeat_interleave(block[0], -2)[..., :outputs, :], torch.arange(inputs) // block[1]


def inputs_notice(source: str) -> str:
    return f"{source} also asks for quantized inputs of its layers; they stay as they are"


class Mxfp4(SafetensorsFormat):
    """A checkpoint with quant_method "mxfp4": experts' weights in blocks of 32 e2m1 codes, with an exponent (e8m0) each.

    They are `[experts, outputs, inputs]`; transformers' parameters of the same names are `[experts, inputs, outputs]`.
    """

    def __init__(self, document: Document, files: TensorFiles) -> None:
        super().__init__(files, files.parts_by_weight(_MXFP4_PARTS, separator="_", own=""))

    def _stored_weight(self, name: str) -> FormatWeight:
        parts = self._parts[name]
        blocks = self._files.read_tensor(parts["blocks"], torch.uint8)
        if blocks.dim() < 3 or blocks.shape[-1] != _MXFP4_BYTES:
            raise ValueError(
                f"{self._files.source}: {parts['blocks']} has the shape {list(blocks.shape)}, and is to be blocks of "
                f"{_MXFP4_BYTES} bytes; {DOWNLOAD}"
            )
        exponents = self._files.read_tensor(parts["scales"], torch.uint8, shape=tuple(blocks.shape[:-1]))
        scale = _power_of_two(f"{self._files.source}: {parts['scales']}", exponents)
        return FormatWeight(f"{self._files.source}: {name}", "fp4", blocks.flatten(-2), scale)


def _power_of_two(name: str, exponents: Tensor) -> Tensor:
    """Return scales 2 ** (exponent - 127) in bfloat16, which holds all, of exponents as uint8 or float8_e8m0fnu."""
    if bool((exponents.view(torch.uint8) == 255).any()):  # e8m0's NaN
        raise ValueError(f"{name} holds NaN; {DOWNLOAD}")
    return exponents.view(torch.float8_e8m0fnu).to(torch.bfloat16)
