# SPDX-License-Identifier: Apache-2.0
"""Steps as JSON, and back: each value is checked against the type that its step has for it. Imports no torch."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from .steps import Step


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
    return _find_builder(kind)(value)


_Builder = Callable[[Any], Any]


@cache
def _find_builder(kind: Any) -> _Builder:
    """Return what builds values of a type: a plan has many thousands of few types."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Step or kind in get_args(Step):
        return _make_step_builder(kind)
    if is_dataclass(kind):
        return _make_members_builder(kind)
    if origin in (Union, types.UnionType):
        if arguments == (int, float):
            return _build_number
        (own,) = (each for each in arguments if each is not type(None))
        build_own = _find_builder(own)
        return lambda value: None if value is None else build_own(value)
    if origin is Literal:
        return lambda value: value if value in arguments else _refuse(kind, value)
    if origin is tuple and arguments[0] is int:  # shapes and strides, most of all
        return lambda value: (
            tuple(value) if type(value) is list and {*map(type, value)} <= {int} else _refuse(kind, value)
        )
    if origin in (tuple, list):
        build_each = _find_builder(arguments[0])
        return lambda value: origin(map(build_each, value)) if type(value) is list else _refuse(kind, value)
    if origin is dict:
        build_inner = _find_builder(arguments[1])
        return lambda value: (
            {name: build_inner(each) for name, each in value.items()} if type(value) is dict else _refuse(kind, value)
        )
    allowed = (int, float) if kind is float else (kind,)
    return lambda value: value if type(value) in allowed else _refuse(kind, value)


def _refuse(kind: Any, value: Any) -> NoReturn:
    raise ValueError(f"it has {shorten(value)} where {getattr(kind, '__name__', kind)} belongs")


def _make_members_builder(make: Any) -> _Builder:
    hints = get_type_hints(make)
    members = {field.name: _find_builder(hints[field.name]) for field in fields(make)}

    def build(value: Any) -> Any:
        if type(value) is not dict or value.keys() != members.keys():
            _refuse(make, value)
        return make(*[build_member(value[name]) for name, build_member in members.items()])

    return build


def _make_step_builder(kind: Any) -> _Builder:
    builders = {each.__name__: _make_members_builder(each) for each in get_args(Step) if kind in (Step, each)}

    def build(value: Any) -> Any:
        name = value.get("kind") if type(value) is dict else None
        build_step = builders.get(name) if type(name) is str else None
        if build_step is None:
            raise ValueError(f"it has the step {shorten(value)}")
        return build_step({key: each for key, each in value.items() if key != "kind"})

    return build


def _build_number(value: Any) -> int | float:
    if not isinstance(value, bool) and isinstance(value, int | float):
        return value
    if isinstance(value, str) and value in _NUMBERS:
        return float(value)
    raise ValueError(f"it has {shorten(value)} where a number belongs")
