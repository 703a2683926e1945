# SPDX-License-Identifier: Apache-2.0
"""MXFP4 checkpoints as gpt-oss has them: experts' weights in blocks of 32 e2m1 codes, with an exponent (e8m0) each.

The layout is that of transformers' `convert_moe_packed_tensors`; the format is that of
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .format import SafetensorsFormat
from .settings import Document
from .stored import FormatWeight
from .tensors import DOWNLOAD, TensorFiles, check_parts


_ENDINGS = {"_blocks": "blocks", "_scales": "scales"}
_BLOCK_BYTES = 16
_NO_NUMBER = 255


class Mxfp4(SafetensorsFormat):
    """A checkpoint with quant_method "mxfp4" in its config.

    Its weights are `[experts, outputs, inputs]`; the parameters of transformers' gpt-oss, which have the same names, are
    `[experts, inputs, outputs]`.
    """

    def __init__(self, document: Document, files: TensorFiles) -> None:
        found: dict[str, dict[str, str]] = {}
        for name in sorted(files.names):
            for ending, part in _ENDINGS.items():
                if name.endswith(ending):
                    found.setdefault(name.removesuffix(ending), {})[part] = name
        for weight, parts in found.items():
            check_parts(files, weight, parts, tuple(_ENDINGS.values()))
        super().__init__(files, found)

    def _stored_weight(self, name: str) -> FormatWeight:
        parts = self._parts[name]
        blocks = self._files.read_tensor(parts["blocks"], torch.uint8)
        if blocks.dim() < 3 or blocks.shape[-1] != _BLOCK_BYTES:
            raise ValueError(
                f"{self._files.source}: {parts['blocks']} has the shape {list(blocks.shape)}, and is to be blocks of "
                f"{_BLOCK_BYTES} bytes; {DOWNLOAD}"
            )
        exponents = self._files.read_tensor(parts["scales"], torch.uint8, shape=tuple(blocks.shape[:-1]))
        scale = power_of_two(f"{self._files.source}: {parts['scales']}", exponents)
        return FormatWeight(f"{self._files.source}: {name}", "fp4", blocks.flatten(-2), scale)


def power_of_two(name: str, exponents: Tensor) -> Tensor:
    """Return scales 2 ** (exponent - 127) in bfloat16, which holds all, of exponents as uint8 or float8_e8m0fnu.

    Raises:
        ValueError: an exponent stands for no number.
    """
    if bool((exponents.view(torch.uint8) == _NO_NUMBER).any()):
        raise ValueError(f"{name} holds NaN; {DOWNLOAD}")
    return exponents.view(torch.float8_e8m0fnu).to(torch.bfloat16)
