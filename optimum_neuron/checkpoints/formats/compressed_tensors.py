# SPDX-License-Identifier: Apache-2.0
"""compressed-tensors checkpoints: whole numbers of 4 or 8 bits, packed or not, and e4m3, with scales of four shapes.

Source: https://github.com/vllm-project/compressed-tensors, quantization/quant_config.py, quant_args.py, utils/match.py, compressors/pack_quantized,
compressors/naive_quantized, and quantization/lifecycle/forward_helpers.py (`_dequantize`). The library returns the numbers that this module
reads, rounded to the type of the scales.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import settings
from .format import FLOATS, SafetensorsFormat, TensorFiles
from .fp8 import inputs_notice, spread_scales
from .settings import Document, take_part, take_text, take_texts
from .stored import DOWNLOAD, FormatWeight, check_group, unpack


PACKED = "pack-quantized"
# Kinds of numbers by format.
_FORMATS = {
    PACKED: ("int",), "int-quantized": ("int",), "float-quantized": ("float",), "naive-quantized": ("int", "float"),
}  # fmt: skip
_OF_WEIGHTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
_OF_INPUTS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")
_GLOBAL = ("weight_global_scale", "input_global_scale")
_OF_CACHE = ("k_scale", "v_scale", "k_zero_point", "v_zero_point", "q_scale", "q_zero_point")
_PATTERN = "re:"
_CLASS = re.compile(r"(?!re:)[^.]*")
# Further settings of a checkpoint, which cannot be left out.
_MORE = {"sparsity_config": "sparse weights", "transform_config": "transformed weights"}
_REMEDY = "export a checkpoint without it"


@dataclass(frozen=True)
class Scheme:
    """A way to store weights: the part that shares a scale is a tensor, channel, group of inputs, or block of outputs and inputs."""

    targets: tuple[str, ...]
    format: str
    codes: str
    bits: int
    symmetric: bool
    strategy: str
    block: tuple[int, int] | None
    quantized_inputs: bool


def _scheme_of(module: str, schemes: Sequence[Scheme], ignore: Sequence[str], source: str) -> Scheme:
    """Return the scheme of a layer with quantized tensors; raise ValueError if it has none, or is to be ignored.

    A class's name as a target, such as Linear, stands for all layers that no other target names: a file names no classes.
    """
    ignored = next((target for target in ignore if _is_named_by(target, module)), None)
    if ignored is not None:
        raise ValueError(f"{source} holds {module} quantized, and ignores it by {ignored!r}; correct config.json")
    exact = [scheme for scheme in schemes if module in scheme.targets]
    named = [scheme for scheme in schemes if any(_is_named_by(target, module) for target in scheme.targets)]
    by_class = [scheme for scheme in schemes if any(map(_CLASS.fullmatch, scheme.targets))]
    for found in (exact, named, by_class):
        if len(found) > 1 and any(scheme != found[0] for scheme in found):
            break
        if found:
            return found[0]
    raise ValueError(
        f"{source} holds {module} quantized, and config_groups have {'no' if not by_class + named else 'more than one'} "
        f"scheme for it; correct config.json"
    )


def _read_schemes(document: Document, source: str) -> list[Scheme]:
    for name, what in _MORE.items():
        asked = document.get(name)
        if asked and not (name == "sparsity_config" and take_part(document, name).get("format") == "dense"):
            raise ValueError(f"{source} asks for {what} ({name}); {_REMEDY}")
    groups, common = take_part(document, "config_groups"), take_text(document, "format", "")
    if not groups:
        raise ValueError(f"{source} has no config_groups in its quantization_config; correct config.json")
    return [_read_scheme(take_part(groups, name), common, f"{source}: {name}") for name in groups]


def _read_scheme(group: Document, common: str, where: str) -> Scheme:
    weights = take_part(group, "weights")
    if not weights:
        raise ValueError(f"{where} quantizes no weights; {_REMEDY}")
    named = take_text(group, "format", common)
    if named not in _FORMATS:
        given = "no format of its own" if named == "mixed-precision" else f"the format {named!r}"
        raise ValueError(f"{where} has {given}, which is not read; export a checkpoint in {', '.join(_FORMATS)}")
    kind, bits = take_text(weights, "type", "int"), settings.take_whole(weights, "num_bits", 8)
    if kind not in _FORMATS[named] or bits not in ((4, 8) if kind == "int" else (8,)):
        raise ValueError(
            f"{where} has weights of {bits} bits, type {kind}, in the format {named}, which is not read; export one of int with 4 "
            f"or 8 bits, or of float with 8"
        )
    symmetric = settings.take_switch(weights, "symmetric", default=True)
    if kind == "float" and not symmetric:
        raise ValueError(f"{where} has zero points for floats; {_REMEDY}")
    if weights.get("dynamic"):
        raise ValueError(f"{where} has dynamic weights; {_REMEDY}")
    size = None if weights.get("group_size") is None else settings.group_size(weights)
    guessed = "group" if size else "channel" if weights.get("group_size") == -1 else "tensor"
    strategy = take_text(weights, "strategy", guessed)
    block = weights.get("block_structure")
    if isinstance(block, str) and re.fullmatch(r"\d{1,7}x\d{1,7}", block):
        block = [int(size) for size in block.split("x")]
    if strategy not in ("tensor", "channel", "group", "block") or (strategy == "group" and size is None):
        raise ValueError(f"{where} has scales by {strategy} with group_size={size}, which is not read; {_REMEDY}")
    sizes = (1, size) if strategy == "group" and size is not None else None
    if strategy == "block":
        sizes = settings.block_of(block, f"{where} names block_structure")
    codes = "fp8" if kind == "float" else "int4" if named == PACKED and bits == 4 else "int8"
    quantized_inputs = bool(group.get("input_activations") or group.get("output_activations"))
    return Scheme(take_texts(group, "targets"), named, codes, bits, symmetric, strategy, sizes, quantized_inputs)


def _is_named_by(target: str, module: str) -> bool:
    """Return whether a target is a layer's name, or a pattern that its name begins with."""
    if not target.startswith(_PATTERN):
        return target == module
    return settings.begins_with(target.removeprefix(_PATTERN), module)


class CompressedTensors(SafetensorsFormat):
    """A checkpoint with quant_method "compressed-tensors" in its config."""

    def __init__(self, document: Document, files: TensorFiles) -> None:
        schemes, ignore = _read_schemes(document, files.source), take_texts(document, "ignore")
        other = next((name for name in files.names if name.rpartition(".")[2] in _GLOBAL), None)
        if other is not None:
            raise ValueError(
                f"{files.source} holds {other}, which belongs to a scheme that is not read; export a checkpoint without it"
            )
        found = files.parts_by_weight((), _OF_WEIGHTS)
        self._schemes: dict[str, Scheme] = {}
        for name, parts in found.items():
            scheme = self._schemes[name] = _scheme_of(name.removesuffix(".weight"), schemes, ignore, files.source)
            if scheme.format != PACKED and name in files.names:
                parts["weight"] = name
            needed = ("weight_packed", "weight_shape") if scheme.format == PACKED else ("weight",)
            zero_point = () if scheme.symmetric else ("weight_zero_point",)
            files.check_parts(name, parts, (*needed, "weight_scale", *zero_point))
        of_inputs, of_cache = (
            tuple(name for name in files.names if name.rpartition(".")[2] in own) for own in (_OF_INPUTS, _OF_CACHE)
        )
        notices = []
        if any(scheme.quantized_inputs for scheme in self._schemes.values()) or of_inputs:
            notices.append(inputs_notice(files.source))
        if document.get("kv_cache_scheme") or of_cache:
            notices.append(f"{files.source} also asks for a quantized KV cache; the export chooses its type")
        super().__init__(files, found, left_out=of_inputs + of_cache, notices=tuple(notices))

    def _stored_weight(self, name: str) -> FormatWeight:
        scheme, parts = self._schemes[name], self._parts[name]
        if scheme.format == PACKED:
            codes = self._read_packed(name)
        else:
            code_type = torch.float8_e4m3fn if scheme.codes == "fp8" else torch.int8
            codes = self._files.read_tensor(parts["weight"], code_type, rank=2)
        scale = self._files.read_tensor(parts["weight_scale"], *FLOATS)
        where = f"{self._files.source}: {parts['weight_scale']}"
        order = self._read_groups(name, codes.shape[1]) if "weight_g_idx" in parts else None
        block = scheme.block
        if scheme.strategy == "group" and block is not None and codes.shape[1] % block[1]:
            raise ValueError(
                f"{self._files.source}: {name} has {codes.shape[1]} inputs, which are no groups of {block[1]}; correct group_size in config.json"
            )
        zero = self._read_zeros(name, tuple(scale.shape), codes.shape[0])
        scale, groups = spread_scales(where, scale, codes.shape, block)
        if zero is not None:
            zero = spread_scales(where, zero, codes.shape, block)[0]
        group = groups if order is None else order
        return FormatWeight(f"{self._files.source}: {name}", scheme.codes, codes, scale, zero, group)

    def _read_packed(self, name: str) -> Tensor:
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
        tensor = parts["weight_zero_point"]
        if scheme.format == PACKED and not scheme.symmetric and scheme.strategy in ("group", "channel"):
            packed_shape = (-(-outputs // (32 // scheme.bits)), math.prod(shape[1:]))
            words = self._files.read_tensor(tensor, torch.int32, shape=packed_shape)
            zero = unpack(words.T, scheme.bits)[:, :outputs].T.short()
            return zero if scheme.bits == 4 else zero - 128
        zero = self._files.read_tensor(tensor, torch.int8, torch.int64, *FLOATS, shape=shape)
        values, end = zero.float(), 1 << (scheme.bits - 1)
        if scheme.symmetric:
            if bool(values.any()):
                raise ValueError(
                    f"{self._files.source}: {tensor} is not zero, and its scheme is symmetric; correct config.json"
                )
            return None
        wrong = values[(values != values.round()) | (values < -end) | (values >= end)]
        if wrong.numel():
            raise ValueError(
                f"{self._files.source}: {tensor} holds the zero point {wrong[0].item():g}, and codes have whole ones of {-end} to "
                f"{end - 1}; {DOWNLOAD}"
            )
        return zero.short() + (8 if scheme.codes == "int4" else 0)

    def _read_groups(self, name: str, inputs: int) -> Tensor | None:
        scheme, tensor = self._schemes[name], self._parts[name]["weight_g_idx"]
        group = self._files.read_tensor(tensor, torch.int32, torch.int64, shape=(inputs,))
        if (
            scheme.strategy != "group" or scheme.block is None or bool((group == -1).all())
        ):  # the value without such an order
            return None
        size = scheme.block[1]
        group = check_group(f"{self._files.source}: {tensor}", group, inputs // size)
        if not bool((group.bincount(minlength=inputs // size) == size).all()):
            raise ValueError(f"{self._files.source}: {tensor} has groups of other than {size} inputs; {DOWNLOAD}")
        return group
