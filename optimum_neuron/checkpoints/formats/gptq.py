# SPDX-License-Identifier: Apache-2.0
"""GPTQ checkpoints: codes of 4 or 8 bits packed along inputs, zero points along outputs, groups that may be out of order.

The layout is that of GPTQModel, by which transformers loads them: https://github.com/ModelCloud/GPTQModel,
gptqmodel/nn_modules/qlinear/__init__.py (`PackableQuantLinear`) and gptqmodel/utils/model.py.
"""

from __future__ import annotations

import torch

from .format import SafetensorsFormat
from .settings import Document, begins_with, group_size, take_part, take_text, take_whole
from .stored import FormatWeight, check_group, unpack
from .tensors import FLOATS, TensorFiles, parts_by_weight


NEEDED = ("qweight", "qzeros", "scales")
FORMATS = ("gptq", "gptq_v2")
BITS = (4, 8)
# In the first format all zero points are stored less one, subtracted from whole words of 32 bits.
_ONES = {4: 0x11111111, 8: 0x01010101}


class Gptq(SafetensorsFormat):
    """A checkpoint with quant_method "gptq" in its config."""

    def __init__(self, document: Document, files: TensorFiles) -> None:
        self._format = take_text(document, "checkpoint_format", take_text(document, "format", FORMATS[0]))
        if self._format not in FORMATS:
            raise ValueError(
                f"{files.source} is a GPTQ checkpoint of the format {self._format}; export one of {' or '.join(FORMATS)}"
            )
        self._document = document
        found = parts_by_weight(files, NEEDED, ("g_idx",))
        self._settings = {name: self._settings_of(name.removesuffix(".weight"), files.source) for name in found}
        super().__init__(files, found)

    def _settings_of(self, module: str, source: str) -> tuple[int, int | None]:
        """Return bits and inputs of a group."""
        document: Document = self._document
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
        if bits not in BITS:
            raise ValueError(
                f"{source} has GPTQ weights of {bits} bits ({module}); export one of {' or '.join(map(str, BITS))} bits"
            )
        return bits, group_size(document, 128)

    def _stored_weight(self, name: str) -> FormatWeight:
        parts, (bits, size) = self._parts[name], self._settings[name]
        words = self._files.read_tensor(parts["qweight"], torch.int32, rank=2)
        per_word = 32 // bits
        inputs, outputs = words.shape[0] * per_word, words.shape[1]
        size = size or inputs
        groups = -(-inputs // size)
        scale = self._files.read_tensor(parts["scales"], *FLOATS, shape=(groups, outputs))
        zeros = self._files.read_tensor(parts["qzeros"], torch.int32, shape=(groups, -(-outputs // per_word)))
        if self._format == FORMATS[0]:
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
