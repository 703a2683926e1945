# SPDX-License-Identifier: Apache-2.0
"""Schemes in the config of a compressed-tensors checkpoint: which layers are stored how; a part that is not read is refused.

Source: https://github.com/vllm-project/compressed-tensors, quantization/quant_config.py, quant_args.py and utils/match.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .settings import (
    Document,
    begins_with,
    block_of,
    group_size,
    take_part,
    take_switch,
    take_text,
    take_texts,
    take_whole,
)


PACKED, WHOLE, FLOAT, NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
FORMATS = (PACKED, WHOLE, FLOAT, NAIVE)
_MIXED = "mixed-precision"
_PATTERN = "re:"
_PAIR = re.compile(r"\d{1,7}x\d{1,7}")
# Further settings of a checkpoint, which cannot be left out.
_MORE = {"sparsity_config": "sparse weights", "transform_config": "transformed weights"}
_REMEDY = "export a checkpoint without it"


@dataclass(frozen=True)
class Scheme:
    """A way to store weights.

    Attributes:
        format: one of `FORMATS`.
        kind: "int" or "float".
        strategy: "tensor", "channel", "group" or "block": the part of a weight that shares a scale.
        group_size: inputs of a group.
        block: outputs and inputs of a block.
        quantized_inputs: the layers' inputs or results are to be quantized too.
    """

    targets: tuple[str, ...]
    format: str
    kind: str
    bits: int
    symmetric: bool
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    quantized_inputs: bool

    @property
    def codes(self) -> str:
        """The kind of codes, as `StoredWeight` calls it."""
        return "fp8" if self.kind == "float" else "int4" if self.format == PACKED and self.bits == 4 else "int8"


@dataclass(frozen=True)
class Schemes:
    """The schemes of a checkpoint's layers."""

    source: str
    schemes: tuple[Scheme, ...]
    ignore: tuple[str, ...]

    def scheme_of(self, module: str) -> Scheme:
        """Return the scheme of a layer with quantized tensors; raise ValueError if it has none, or is to be ignored.

        A class's name as a target, such as Linear, stands for all layers that no other target names: a file names no classes.
        """
        ignored = next((target for target in self.ignore if _is_named_by(target, module)), None)
        if ignored is not None:
            raise ValueError(
                f"{self.source} holds {module} quantized, and its config ignores it by {ignored!r}; correct config.json"
            )
        exact = [scheme for scheme in self.schemes if module in scheme.targets]
        named = [scheme for scheme in self.schemes if any(_is_named_by(target, module) for target in scheme.targets)]
        by_class = [scheme for scheme in self.schemes if any(_is_class(target) for target in scheme.targets)]
        for found in (exact, named, by_class):
            if len(found) > 1 and any(scheme != found[0] for scheme in found):
                break
            if found:
                return found[0]
        raise ValueError(
            f"{self.source} holds {module} quantized, and config_groups have {'no' if not by_class + named else 'more than one'} "
            f"scheme for it; correct config.json"
        )


def read_schemes(document: Document, source: str) -> Schemes:
    """Return the schemes of a config's quantization_config; raise ValueError that names a part that is not read."""
    for name, what in _MORE.items():
        asked = document.get(name)
        if asked and not (name == "sparsity_config" and take_part(document, name).get("format") == "dense"):
            raise ValueError(f"{source} asks for {what} ({name}); {_REMEDY}")
    groups = take_part(document, "config_groups")
    if not groups:
        raise ValueError(f"{source} has no config_groups in its quantization_config; correct config.json")
    common = take_text(document, "format", "")
    schemes = tuple(_read_scheme(take_part(groups, name), common, f"{source}: {name}") for name in groups)
    return Schemes(source, schemes, take_texts(document, "ignore"))


def _read_scheme(group: Document, common: str, where: str) -> Scheme:
    weights = take_part(group, "weights")
    if not weights:
        raise ValueError(f"{where} quantizes no weights; {_REMEDY}")
    named = take_text(group, "format", common)
    if named not in FORMATS:
        given = "no format of its own" if named == _MIXED else f"the format {named!r}"
        raise ValueError(f"{where} has {given}, which is not read; export a checkpoint in {', '.join(FORMATS)}")
    kind, bits = take_text(weights, "type", "int"), take_whole(weights, "num_bits", 8)
    read = (4, 8) if kind == "int" else (8,)
    fits = {PACKED: ("int",), WHOLE: ("int",), FLOAT: ("float",), NAIVE: ("int", "float")}[named]
    if kind not in fits or bits not in read:
        raise ValueError(
            f"{where} has weights of {bits} bits, type {kind}, in the format {named}, which is not read; export one of int with 4 "
            f"or 8 bits, or of float with 8"
        )
    symmetric = take_switch(weights, "symmetric", default=True)
    if kind == "float" and not symmetric:
        raise ValueError(f"{where} has zero points for floats; {_REMEDY}")
    if weights.get("dynamic"):
        raise ValueError(f"{where} has dynamic weights; {_REMEDY}")
    size = None if weights.get("group_size") is None else group_size(weights)
    guessed = "group" if size else "channel" if weights.get("group_size") == -1 else "tensor"
    strategy = take_text(weights, "strategy", guessed)
    block = weights.get("block_structure")
    if isinstance(block, str) and _PAIR.fullmatch(block):
        block = [int(size) for size in block.split("x")]
    if strategy not in ("tensor", "channel", "group", "block") or (strategy == "group" and size is None):
        raise ValueError(f"{where} has scales by {strategy} with group_size={size}, which is not read; {_REMEDY}")
    return Scheme(
        targets=take_texts(group, "targets"),
        format=named,
        kind=kind,
        bits=bits,
        symmetric=symmetric,
        strategy=strategy,
        group_size=size,
        block=block_of(block, f"{where} names block_structure") if strategy == "block" else None,
        quantized_inputs=bool(group.get("input_activations") or group.get("output_activations")),
    )


def _is_named_by(target: str, module: str) -> bool:
    """Return whether a target is a layer's name, or a pattern that its name begins with."""
    if not target.startswith(_PATTERN):
        return target == module
    return begins_with(target.removeprefix(_PATTERN), module)


def _is_class(target: str) -> bool:
    return not target.startswith(_PATTERN) and "." not in target
