# SPDX-License-Identifier: Apache-2.0
"""AWQ checkpoints of the version "gemm": codes and zero points of 4 bits, eight outputs to a word in an order of their own.

The order is that of AutoAWQ, https://github.com/casper-hansen/AutoAWQ, awq/utils/packing_utils.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .format import SafetensorsFormat
from .settings import Document, group_size, take_switch, take_text, take_whole
from .stored import FormatWeight, unpack
from .tensors import FLOATS, TensorFiles, parts_by_weight


NEEDED = ("qweight", "qzeros", "scales")
# Where in a word each of its eight outputs is, counted from the lowest bits.
_PLACES = torch.tensor((0, 4, 1, 5, 2, 6, 3, 7))


class Awq(SafetensorsFormat):
    """A checkpoint with quant_method "awq" in its config."""

    def __init__(self, document: Document, files: TensorFiles) -> None:
        bits, version = (
            take_whole(document, "bits", take_whole(document, "w_bit", 4)),
            take_text(document, "version", "gemm"),
        )
        version = take_text(document, "format", version)
        if bits != 4 or version != "gemm" or not take_switch(document, "zero_point", default=True):
            raise ValueError(
                f"{files.source} is an AWQ checkpoint of {bits} bits, version {version}, zero_point="
                f"{document.get('zero_point')}; export one of 4 bits, version gemm, with zero points"
            )
        self._group_size = group_size(document, take_whole(document, "q_group_size", 128))
        super().__init__(files, parts_by_weight(files, NEEDED))

    def _stored_weight(self, name: str) -> FormatWeight:
        parts = self._parts[name]
        words = self._files.read_tensor(parts["qweight"], torch.int32, rank=2)
        inputs, outputs = words.shape[0], words.shape[1] * 8
        size = self._group_size or inputs
        if inputs % size:
            raise ValueError(
                f"{self._files.source}: {parts['qweight']} has {inputs} inputs, which are no groups of {size}; correct group_size "
                f"in config.json"
            )
        scale = self._files.read_tensor(parts["scales"], *FLOATS, shape=(inputs // size, outputs))
        zeros = self._files.read_tensor(parts["qzeros"], torch.int32, shape=(inputs // size, outputs // 8))
        codes, zero = _in_order(words), _in_order(zeros)
        return FormatWeight(f"{self._files.source}: {name}", "int4", codes.T, scale.T, zero.T.short())


def _in_order(words: Tensor) -> Tensor:
    """Return codes `[rows, 8 * words]` of words `[rows, words]`, in the order of the outputs."""
    return unpack(words, 4).unflatten(-1, (-1, 8))[..., _PLACES].flatten(-2)
