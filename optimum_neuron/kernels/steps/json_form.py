# SPDX-License-Identifier: Apache-2.0
"""Steps as JSON, and back: each value is checked against the type that its step has for it. Imports no torch."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

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
    members = {name: write_as_json(each) for name, each in vars(value).items()}
    if "operands" in members:
        numbers = members["operands"]
        members["operands"] = [str(n) if isinstance(n, float) and not math.isfinite(n) else n for n in numbers]
    return kind | members


def build_from_json(kind: Any, value: Any) -> Any:
    """Return a value of a type from its JSON.

    Raises:
        ValueError: the JSON has another type.
    """
    return _builder_of(kind)(value)


_Builder = Callable[[Any], Any]


@cache
def _builder_of(kind: Any) -> _Builder:
    """Return what builds values of a type: a plan has many thousands of few types."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return _build_argument
    if kind is Step or kind in get_args(Step):
        return _step_builder(kind)
    if origin in (Union, types.UnionType):
        return _choice_builder(arguments)
    if origin is Literal:
        return lambda value: value if value in arguments else _refuse(kind, value)
    if origin is tuple and arguments[0] is int:  # shapes and strides, most of all
        return _build_whole_numbers
    if origin is tuple:
        each = _builder_of(arguments[0])
        return lambda value: tuple(map(each, value)) if type(value) is list else _refuse(kind, value)
    if origin is list:
        return lambda value: list(map(_build_argument, value)) if type(value) is list else _refuse(kind, value)
    if origin is dict:
        inner = _builder_of(arguments[1])
        return lambda value: (
            {name: inner(each) for name, each in value.items()} if type(value) is dict else _refuse(kind, value)
        )
    if is_dataclass(kind):
        return _members_builder(kind)
    if kind is float:
        return lambda value: value if type(value) in (int, float) else _refuse(kind, value)
    return lambda value: value if type(value) is kind else _refuse(kind, value)


def _refuse(kind: Any, value: Any) -> NoReturn:
    raise ValueError(f"it has {shorten(value)} where {getattr(kind, '__name__', kind)} belongs")


def _build_whole_numbers(value: Any) -> tuple[int, ...]:
    if type(value) is not list:
        _refuse(tuple, value)
    for each in value:
        if type(each) is not int:
            _refuse(tuple, value)
    return tuple(value)


def _members_builder(make: Any) -> _Builder:
    hints = get_type_hints(make)
    members = [(field.name, _builder_of(hints[field.name])) for field in fields(make)]
    names = {name for name, _ in members}

    def build(value: Any) -> Any:
        if type(value) is not dict or value.keys() != names:
            _refuse(make, value)
        return make(*[build_member(value[name]) for name, build_member in members])

    return build


def _step_builder(kind: Any) -> _Builder:
    builders = {each.__name__: _members_builder(each) for each in get_args(Step) if kind in (Step, each)}

    def build(value: Any) -> Any:
        name = value.get("kind") if type(value) is dict else None
        build_step = builders.get(name) if type(name) is str else None
        if build_step is None:
            raise ValueError(f"it has the step {shorten(value)}")
        return build_step({key: each for key, each in value.items() if key != "kind"})

    return build


def _choice_builder(kinds: tuple[Any, ...]) -> _Builder:
    has_none, numbers = type(None) in kinds, tuple(kind for kind in (int, float) if kind in kinds)
    rest = [kind for kind in kinds if kind not in (int, float, type(None))]
    build_rest = _builder_of(rest[0]) if len(rest) == 1 else None
    takes_names = float in kinds and str not in kinds

    def build(value: Any) -> Any:
        if value is None and has_none:
            return None
        if type(value) in numbers:
            return value
        if takes_names and type(value) is str:
            if value not in _NUMBERS:
                raise ValueError(f"it has {shorten(value)} where a number belongs")
            return float(value)
        if build_rest is None:
            raise ValueError(f"it has {shorten(value)} where a number belongs")
        return build_rest(value)

    return build


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
