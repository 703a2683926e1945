# SPDX-License-Identifier: Apache-2.0
"""A plan in its file, and what it was made for, as the kernels check no size of what they are given."""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from ...artifact.schema import TEXT, anything, first_difference, listed, named, read_object, record, shown, whole
from ...config import NeuronConfig
from ...kernels.plan import program
from ...kernels.plan.access import ALL_SIZES
from ...kernels.plan.program import Plan
from ...step.model_spec import ModelSpec
from ...step.spec import GraphSpec


FORMAT = 9
_NUMBERS = ("inf", "-inf", "nan")  # which JSON has no other way to say
_FILE = record(
    {
        "format": whole(1),
        "graph": record(dict.fromkeys((field.name for field in fields(GraphSpec)), anything), closed=True),
        "model": record(dict.fromkeys((field.name for field in fields(ModelSpec)), anything), closed=True),
        "dtype": TEXT,
        "tensors": named(record({"dtype": TEXT, "shape": listed(whole(0))}, closed=True)),
        "plan": anything,
        "sha256": TEXT,
    },
    closed=True,
)


@dataclass(frozen=True)
class Facts:
    """What plans depend on, beside their own graph."""

    model: ModelSpec
    dtype: str

    @classmethod
    def of(cls, config: NeuronConfig, model: ModelSpec) -> Facts:
        return cls(model, config.dtype)


def write_plan(path: Path, plan: Plan, spec: GraphSpec, facts: Facts, tensors: Mapping[str, Tensor]) -> None:
    """Writes a plan.

    Args:
        tensors: weights and states that the graph uses, by name.
    """
    own = {name: {"dtype": _dtype(value), "shape": list(value.shape)} for name, value in tensors.items()}
    content = _expected(spec, facts) | {"tensors": own, "plan": plan.to_dict()}
    path.write_text(_text(content | {"sha256": _digest(content)}), encoding="utf-8")


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"), sort_keys=True)


def _digest(content: Mapping[str, Any]) -> str:
    """Of all but itself: so a plan that was changed in a place that nothing else contradicts is found."""
    rest = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(_text(rest).encode()).hexdigest()


def read_plan(path: Path, spec: GraphSpec, facts: Facts, tensors: Mapping[str, Tensor]) -> Plan:
    """Reads the plan of a graph.

    Args:
        tensors: what the artifact has, by name.

    Raises:
        ValueError: it is none, or was made for another graph, model, type or tensors.
        OldPlanError: it is of another format, and has to be made again.
    """
    found = read_object(path)
    if found.get("format") != FORMAT:
        raise OldPlanError(f"it has the format {shown(found.get('format'))}, and this version reads {FORMAT}")
    _FILE("the plan", found)
    if found["sha256"] != _digest(found):
        raise ValueError("it is not what was written: its digest is another")
    difference = first_difference(found, _expected(spec, facts))
    if difference is not None:
        name, made, asked = difference
        raise ValueError(f"it was compiled for {name}={shown(made)}, and the artifact has {shown(asked)}")
    for name, known in found["tensors"].items():
        if name not in tensors:
            raise ValueError(f"it needs {name}, which the artifact lacks")
        own = {"dtype": _dtype(tensors[name]), "shape": list(tensors[name].shape)}
        if own != known:
            raise ValueError(
                f"it was compiled for {name} as {known['dtype']} {known['shape']}, and the artifact has {own['dtype']} "
                f"{own['shape']}"
            )
    try:
        plan: Plan = _build(Plan, found["plan"])
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    for buffer in plan.buffers:
        if buffer.kind == "tensor" and buffer.name not in found["tensors"]:
            raise ValueError(f"it uses {shown(buffer.name)}, of which it says nothing")
    return plan


class OldPlanError(ValueError):
    """A plan of another format."""


def _expected(spec: GraphSpec, facts: Facts) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "graph": asdict(spec),
        "model": {"convolutions": [], "recurrences": [], "selections": [], "compressions": []} | facts.model.to_dict(),
        "dtype": facts.dtype,
    }


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _build(kind: Any, value: Any) -> Any:
    """A value of a type from the JSON that it was written as.

    Raises:
        ValueError: it is of another type.
    """
    origin, arguments, is_step = _form(kind)
    if kind is Any:
        return _argument(value)
    if is_step:
        return _build_step(kind, value)
    if origin in (Union, types.UnionType):
        return _build_one_of(arguments, value)
    if origin is Literal:
        fits, built = value in arguments, value
    elif origin is tuple:
        fits, of_ints = isinstance(value, list), arguments[0] is int
        if of_ints:  # shapes and strides, most of all
            fits = fits and all(type(each) is int for each in value)
        built = (tuple(value) if of_ints else tuple(_build(arguments[0], each) for each in value)) if fits else None
    elif origin is list:
        fits = isinstance(value, list)
        built = [_argument(each) for each in value] if fits else None
    elif origin is dict:
        fits = isinstance(value, dict)
        built = {name: _argument(each) for name, each in value.items()} if fits else None
    elif is_dataclass(kind):
        fits, built = _build_members(kind, value)
    elif kind is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        built = value
    else:
        fits, built = type(value) is kind, value
    if not fits:
        raise ValueError(f"it has {shown(value)} where {getattr(kind, '__name__', kind)} belongs")
    return built


@cache
def _form(kind: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """What a type is made of, and whether it is a step's."""
    return get_origin(kind), get_args(kind), kind is program.Step or kind in get_args(program.Step)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind, vars(program))
    return {field.name: hints[field.name] for field in fields(kind)}


def _build_step(kind: Any, value: Any) -> Any:
    """A step, which says of which kind it is."""
    kinds = {each.__name__: each for each in get_args(program.Step) if kind in (program.Step, each)}
    found = kinds.get(value.get("kind")) if isinstance(value, dict) and type(value.get("kind")) is str else None
    fits, built = False, None
    if found is not None:
        fits, built = _build_members(found, {name: each for name, each in value.items() if name != "kind"})
    if not fits:
        raise ValueError(f"it has the step {shown(value)}")
    return built


def _build_members(make: Any, value: Any) -> tuple[bool, Any]:
    """Whether a value has the members of a dataclass, and it."""
    hints = _hints(make)
    fits = isinstance(value, dict) and value.keys() == hints.keys()
    return fits, make(**{name: _build(hint, value[name]) for name, hint in hints.items()}) if fits else None


def _build_one_of(kinds: tuple[Any, ...], value: Any) -> Any:
    if value is None and type(None) in kinds:
        return None
    if isinstance(value, str) and str not in kinds and float in kinds:
        if value not in _NUMBERS:
            raise ValueError(f"it has {shown(value)} where a number belongs")
        return float(value)
    for kind in (int, float):
        if kind in kinds and type(value) is kind:
            return value
    rest = [kind for kind in kinds if kind not in (int, float, type(None))]
    if len(rest) != 1:
        raise ValueError(f"it has {shown(value)} where a number belongs")
    return _build(rest[0], value)


def _argument(value: Any) -> Any:
    """An argument of a call of torch, in which tensors are operands."""
    if isinstance(value, list):
        return [_argument(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind, inner = next(iter(value.items())) if len(value) == 1 else ("", None)
    if kind == "tensor":
        return {"tensor": _build(program.Operand, inner)}
    fits = (kind == "dtype" and isinstance(inner, str) and inner in ALL_SIZES) or (
        kind == "number" and inner in _NUMBERS
    )
    if not fits:
        raise ValueError(f"it has {shown(value)} where an argument belongs")
    return value
