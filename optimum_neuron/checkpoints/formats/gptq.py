# SPDX-License-Identifier: Apache-2.0
"""GPTQ and AWQ checkpoints: codes packed into words of 32 bits, with scales and zero points by groups of inputs.

GPTQ's layout is that of GPTQModel, by which transformers loads it: https://github.com/ModelCloud/GPTQModel,
gptqmodel/nn_modules/qlinear/__init__.py (`PackableQuantLinear`) and gptqmodel/utils/model.py. AWQ's is that of AutoAWQ,
https://github.com/casper-hansen/AutoAWQ, awq/utils/packing_utils.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .format import FLOATS, SafetensorsFormat, TensorFiles
from .settings import Document, begins_with, group_size, take_part, take_switch, take_text, take_whole
from .stored import FormatWeight, check_group, unpack


_NEEDED = ("qweight", "qzeros", "scales")
_FORMATS = ("gptq", "gptq_v2")
# In GPTQ's first format all zero points are stored less one, subtracted from whole words of 32 bits.
_ONES = {4: 0x11111111, 8: 0x01010101}
# Where in a word of AWQ each of its eight outputs is, counted from the lowest bits.
_PLACES = torch.tensor((0, 4, 1, 5, 2, 6, 3, 7))


class Gptq(SafetensorsFormat):
    """A checkpoint with quant_method "gptq": codes along inputs, zero points along outputs, groups that may be out of order."""

    def __init__(self, document: Document, files: TensorFiles) -> None:
        self._format = take_text(document, "checkpoint_format", take_text(document, "format", _FORMATS[0]))
        if self._format not in _FORMATS:
            raise ValueError(
                f"{files.source} is a GPTQ checkpoint of the format {self._format}; export one of {' or '.join(_FORMATS)}"
            )
        found = files.parts_by_weight(_NEEDED, ("g_idx",))
        self._settings = {name: _read_settings(document, name.removesuffix(".weight"), files.source) for name in found}
        super().__init__(files, found)

    def _stored_weight(self, name: str) -> FormatWeight:
        parts, (bits, size) = self._parts[name], self._settings[name]
        words = self._files.read_tensor(parts["qweight"], torch.int32, rank=2)
        per_word = 32 // bits
        inputs, outputs = words.shape[0] * per_word, words.shape[1]
        size = size or inputs
        groups = -(-inputs // size)
        scale = self._files.read_tensor(parts["scales"], *FLOATS, shape=(groups, outputs))
        zeros = self._files.read_tensor(parts["qzeros"], torch.int32, shape=(groups, -(-outputs // per_word)))
        if self._format == _FORMATS[0]:
            zeros = zeros + _ONES[bits]
        zero = unpack(zeros, bits)[:, :outputs].T.short()
        codes = unpack(words.T, bits)
        group = torch.arange(inputs) // size
        if "g_idx" in parts:
            group = self._files.read_tensor(parts["g_idx"], torch.int32, shape=(inputs,))
            group = check_group(f"{self._files.source}: {parts['g_idx']}", group, groups)
        kind = "int4"
        if bits == 8:  # signed codes stand as far from their zero points as unsigned ones
            kind, codes, zero = "int8", (codes ^ 0x80).view(torch.int8), zero - 128
        return FormatWeight(f"{self._files.source}: {name}", kind, codes, scale.T, zero, group)


def _read_settings(document: Document, module: str, source: str) -> tuple[int, int | None]:
    patterns = take_part(document, "dynamic")
    for pattern in patterns:
        if begins_with(pattern.removeprefix("-:").removeprefix("+:"), module):
            if pattern.startswith("-:"):
                raise ValueError(
                    f"{source} holds {module} quantized, and its config leaves it out by {pattern!r}; correct config.json"
                )
            document = {**document, **take_part(patterns, pattern)}
            break
    bits = take_whole(document, "bits")
    if bits not in _ONES:
        raise ValueError(
            f"{source} has GPTQ weights of {bits} bits ({module}); export one of {' or '.join(map(str, _ONES))} bits"
        )
    return bits, group_size(document, 128)


class Awq(SafetensorsFormat):
    """A checkpoint with quant_method "awq", version "gemm": eight outputs to a word in an order of their own."""

    def __init__(self, document: Document, files: TensorFiles) -> None:
        bits = take_whole(document, "bits", take_whole(document, "w_bit", 4))
        version = take_text(document, "format", take_text(document, "version", "gemm"))
        if bits != 4 or version != "gemm" or not take_switch(document, "zero_point", default=True):
            raise ValueError(
                f"{files.source} is an AWQ checkpoint of {bits} bits, version {version}, zero_point="
                f"{document.get('zero_point')}; export one of 4 bits, version gemm, with zero points"
            )
        self._group_size = group_size(document, take_whole(document, "q_group_size", 128))
        super().__init__(files, files.parts_by_weight(_NEEDED))

    def _stored_weight(self, name: str) -> FormatWeight:
        parts = self._parts[name]
        words = self._files.read_tensor(parts["qweight"], torch.int32, rank=2)
        inputs, outputs = words.shape[0], words.shape[1] * 8
        size = self._group_size or inputs
        if inputs % size:
            raise ValueError(
                f"{self._files.source}: {parts['qweight']} has {inputs} inputs, no groups of {size}; correct group_size in config.json"
            )
        scale = self._files.read_tensor(parts["scales"], *FLOATS, shape=(inputs // size, outputs))
        zeros = self._files.read_tensor(parts["qzeros"], torch.int32, shape=(inputs // size, outputs // 8))
        codes, zero = _in_order(words), _in_order(zeros)
        return FormatWeight(f"{self._files.source}: {name}", "int4", codes.T, scale.T, zero.T.short())


def _in_order(words: Tensor) -> Tensor:
    """Return codes `[rows, 8 * words]` of words `[rows, words]`, in the order of the outputs."""
    return unpack(words, 4).unflatten(-1, (-1, 8))[..., _PLACES].flatten(-2)
