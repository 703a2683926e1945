# SPDX-License-Identifier: Apache-2.0
"""Steps as JSON, and back: each value is checked against the type that its step has for it. Imports no torch."""

from __future__ import annotations

import math
import types
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .access import ALL_SIZES
from .steps import Operand, Step


_NUMBERS = ("inf", "-inf", "nan")  # JSON has no such numbers, so they are written as texts
_SHOWN = 60


def shorten(value: object) -> str:
    """Return a value in one short line."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def write_as_json(value: Any) -> Any:
    """Return JSON values for a step, a plan, or a part of either."""
    if isinstance(value, int | str | float) or value is None:
        return value
    if isinstance(value, list | tuple):
        return [write_as_json(each) for each in value]
    if isinstance(value, dict):
        return {name: write_as_json(each) for name, each in value.items()}
    kind = {"kind": type(value).__name__} if isinstance(value, Step) else {}
    members = vars(value).items()
    return kind | {name: _write_numbers(each) if name == "operands" else write_as_json(each) for name, each in members}


def _write_numbers(operands: tuple[Any, ...]) -> list[Any]:
    return [str(each) if isinstance(each, float) and not math.isfinite(each) else each for each in operands]


def build_from_json(kind: Any, value: Any) -> Any:
    """Return a value of a type from its JSON.

    Raises:
        ValueError: the JSON has another type.
    """
    origin, arguments, is_step = _parts_of(kind)
    if kind is Any:
        return _build_argument(value)
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
            built = tuple(value) if fits else None
        else:
            built = tuple(build_from_json(arguments[0], each) for each in value) if fits else None
    elif origin is list:
        fits = isinstance(value, list)
        built = [_build_argument(each) for each in value] if fits else None
    elif origin is dict:
        fits = isinstance(value, dict)
        built = {name: build_from_json(arguments[1], each) for name, each in value.items()} if fits else None
    elif is_dataclass(kind):
        fits, built = _build_members(kind, value)
    elif kind is float:
        fits, built = isinstance(value, int | float) and not isinstance(value, bool), value
    else:
        fits, built = type(value) is kind, value
    if not fits:
        raise ValueError(f"it has {shorten(value)} where {getattr(kind, '__name__', kind)} belongs")
    return built


@cache
def _parts_of(kind: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """Return the origin and the arguments of a type, and whether steps have it."""
    return get_origin(kind), get_args(kind), kind is Step or kind in get_args(Step)


@cache
def _member_types(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _build_step(kind: Any, value: Any) -> Any:
    """Return a step, which names its kind."""
    kinds = {each.__name__: each for each in get_args(Step) if kind in (Step, each)}
    found = kinds.get(value.get("kind")) if isinstance(value, dict) and type(value.get("kind")) is str else None
    fits, built = False, None
    if found is not None:
        fits, built = _build_members(found, {name: each for name, each in value.items() if name != "kind"})
    if not fits:
        raise ValueError(f"it has the step {shorten(value)}")
    return built


def _build_members(make: Any, value: Any) -> tuple[bool, Any]:
    """Return whether a value has the members of a dataclass, and the dataclass's object."""
    members = _member_types(make)
    if not isinstance(value, dict) or value.keys() != members.keys():
        return False, None
    return True, make(**{name: build_from_json(kind, value[name]) for name, kind in members.items()})


def _build_one_of(kinds: tuple[Any, ...], value: Any) -> Any:
    if value is None and type(None) in kinds:
        return None
    if isinstance(value, str) and str not in kinds and float in kinds:
        if value not in _NUMBERS:
            raise ValueError(f"it has {shorten(value)} where a number belongs")
        return float(value)
    for kind in (int, float):
        if kind in kinds and type(value) is kind:
            return value
    rest = [kind for kind in kinds if kind not in (int, float, type(None))]
    if len(rest) != 1:
        raise ValueError(f"it has {shorten(value)} where a number belongs")
    return build_from_json(rest[0], value)


def _build_argument(value: Any) -> Any:
    """Return an argument of a call of torch, in which tensors are operands."""
    if isinstance(value, list):
        return [_build_argument(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind, inner = next(iter(value.items())) if len(value) == 1 else ("", None)
    if kind == "tensor":
        return {"tensor": build_from_json(Operand, inner)}
    is_dtype = kind == "dtype" and isinstance(inner, str) and inner in ALL_SIZES
    if not is_dtype and not (kind == "number" and inner in _NUMBERS):
        raise ValueError(f"it has {shorten(value)} where an argument belongs")
    return value
