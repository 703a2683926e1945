# SPDX-License-Identifier: Apache-2.0
"""compressed-tensors checkpoints: whole numbers of 4 or 8 bits, packed or not, and e4m3, with scales of four shapes.

Source: https://github.com/vllm-project/compressed-tensors, compressors/pack_quantized, compressors/naive_quantized, and
quantization/lifecycle/forward_helpers.py (`_dequantize`). The library computes in the type of the scales: it returns the numbers that this
module reads, rounded to that type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .compressed_schemes import PACKED, Scheme, read_schemes
from .format import SafetensorsFormat
from .fp8 import inputs_notice, spread_scales
from .settings import Document
from .stored import FormatWeight, check_group, unpack
from .tensors import DOWNLOAD, FLOATS, TensorFiles, check_parts, parts_by_weight


_OF_WEIGHTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
_OF_INPUTS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")
_GLOBAL = ("weight_global_scale", "input_global_scale")
_OF_CACHE = ("k_scale", "v_scale", "k_zero_point", "v_zero_point", "q_scale", "q_zero_point")
_WHOLE_TYPES = (torch.int8,)


class CompressedTensors(SafetensorsFormat):
    """A checkpoint with quant_method "compressed-tensors" in its config."""

    def __init__(self, document: Document, files: TensorFiles) -> None:
        schemes = read_schemes(document, files.source)
        other = next((name for name in files.names if name.rpartition(".")[2] in _GLOBAL), None)
        if other is not None:
            raise ValueError(
                f"{files.source} holds {other}, which belongs to a scheme that is not read; export a checkpoint without it"
            )
        found = parts_by_weight(files, (), _OF_WEIGHTS)
        self._schemes = {name: schemes.scheme_of(name.removesuffix(".weight")) for name in found}
        for name, parts in found.items():
            if self._schemes[name].format != PACKED and name in files.names:
                parts["weight"] = name
            check_parts(files, name, parts, _needed(self._schemes[name]))
        of_inputs, of_cache = (
            tuple(name for name in files.names if name.rpartition(".")[2] in parts)
            for parts in (_OF_INPUTS, _OF_CACHE)
        )
        notices = []
        if any(scheme.quantized_inputs for scheme in self._schemes.values()) or of_inputs:
            notices.append(inputs_notice(files.source))
        if document.get("kv_cache_scheme") or of_cache:
            notices.append(
                f"{files.source} also asks for a quantized KV cache, which keeps the type that the export gives it"
            )
        super().__init__(files, found, left_out=of_inputs + of_cache, notices=tuple(notices))

    def _stored_weight(self, name: str) -> FormatWeight:
        scheme, parts = self._schemes[name], self._parts[name]
        codes = self._read_codes(name)
        scale = self._files.read_tensor(parts["weight_scale"], *FLOATS)
        where = f"{self._files.source}: {parts['weight_scale']}"
        group = None
        if "weight_g_idx" in parts:
            group = self._read_groups(name, codes.shape[1])
        elif scheme.strategy in ("tensor", "channel") and scale.numel() not in (1, codes.shape[0]):
            raise ValueError(
                f"{where} has the shape {list(scale.shape)}, and a weight {list(codes.shape)}; {DOWNLOAD}"
            )
        block = self._block_size(name, codes.shape)
        zero = self._read_zeros(name, tuple(scale.shape), codes.shape[0])
        scale, groups = spread_scales(where, scale, codes.shape, block)
        if zero is not None:
            zero = spread_scales(where, zero, codes.shape, block)[0]
        return FormatWeight(
            f"{self._files.source}: {name}", scheme.codes, codes, scale, zero, groups if group is None else group
        )

    def _read_codes(self, name: str) -> Tensor:
        """Return the codes `[outputs, inputs]`."""
        scheme, parts = self._schemes[name], self._parts[name]
        if scheme.format == PACKED:
            return self._unpacked(name)
        expected = (torch.float8_e4m3fn,) if scheme.kind == "float" else _WHOLE_TYPES
        return self._files.read_tensor(parts["weight"], *expected, rank=2)

    def _unpacked(self, name: str) -> Tensor:
        scheme, parts = self._schemes[name], self._parts[name]
        shape = self._files.read_tensor(parts["weight_shape"], torch.int64, torch.int32, shape=(2,)).tolist()
        words = self._files.read_tensor(parts["weight_packed"], torch.int32)
        per_word = 32 // scheme.bits
        if min(shape) < 1 or tuple(words.shape) != (shape[0], -(-shape[1] // per_word)):
            raise ValueError(
                f"{self._files.source}: {parts['weight_packed']} has the shape {list(words.shape)}, and by its weight_shape it holds "
                f"{shape} codes of {scheme.bits} bits; {DOWNLOAD}"
            )
        codes = unpack(words, scheme.bits)[:, : shape[1]]
        return codes if scheme.bits == 4 else (codes ^ 0x80).view(torch.int8)

    def _read_zeros(self, name: str, shape: tuple[int, ...], outputs: int) -> Tensor | None:
        """Return zero points as `FormatWeight` counts them, for scales of a shape."""
        scheme, parts = self._schemes[name], self._parts[name]
        if "weight_zero_point" not in parts:
            return None
        packed = scheme.format == PACKED and not scheme.symmetric and scheme.strategy in ("group", "channel")
        if not packed:
            zero = self._files.read_tensor(
                parts["weight_zero_point"], *_WHOLE_TYPES, torch.int64, *FLOATS, shape=shape
            )
            if scheme.symmetric and bool(zero.float().any()):
                raise ValueError(
                    f"{self._files.source}: {parts['weight_zero_point']} is not zero, and its scheme is symmetric; correct config.json"
                )
            if scheme.symmetric:
                return None
            self._check_range(parts["weight_zero_point"], zero.float(), 1 << (scheme.bits - 1))
            return zero.short() + (8 if scheme.codes == "int4" else 0)
        per_word = 32 // scheme.bits
        columns = math.prod(shape[1:])
        words = self._files.read_tensor(
            parts["weight_zero_point"], torch.int32, shape=(-(-outputs // per_word), columns)
        )
        zero = unpack(words.T, scheme.bits)[:, :outputs].T.short()
        return zero if scheme.bits == 4 else zero - 128

    def _check_range(self, tensor: str, zero: Tensor, end: int) -> None:
        wrong = zero[(zero != zero.round()) | (zero < -end) | (zero >= end)]
        if wrong.numel():
            raise ValueError(
                f"{self._files.source}: {tensor} holds the zero point {wrong[0].item():g}, and codes have whole ones of {-end} to "
                f"{end - 1}; {DOWNLOAD}"
            )

    def _block_size(self, name: str, shape: Sequence[int]) -> tuple[int, int] | None:
        scheme = self._schemes[name]
        if scheme.strategy != "group" or scheme.group_size is None:
            return scheme.block
        if shape[1] % scheme.group_size:
            raise ValueError(
                f"{self._files.source}: {name} has {shape[1]} inputs, which are no groups of {scheme.group_size}; correct group_size "
                f"in config.json"
            )
        return (1, scheme.group_size)

    def _read_groups(self, name: str, inputs: int) -> Tensor | None:
        """Return the group of each input, where inputs have an order of their own."""
        size, tensor = self._schemes[name].group_size, self._parts[name]["weight_g_idx"]
        group = self._files.read_tensor(tensor, torch.int32, torch.int64, shape=(inputs,))
        if size is None or bool((group == -1).all()):  # the value without such an order
            return None
        group = check_group(f"{self._files.source}: {tensor}", group, inputs // size)
        if not bool((group.bincount(minlength=inputs // size) == size).all()):
            raise ValueError(
                f"{self._files.source}: {tensor} has groups of more or less than {size} inputs; {DOWNLOAD}"
            )
        return group


def _needed(scheme: Scheme) -> tuple[str, ...]:
    zero = () if scheme.symmetric or (scheme.kind == "float") else ("weight_zero_point",)
    if scheme.format == PACKED:
        return ("weight_packed", "weight_scale", "weight_shape", *zero)
    return ("weight", "weight_scale", *zero)
