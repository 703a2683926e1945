# SPDX-License-Identifier: Apache-2.0
"""Hostile changes of a plan's JSON: single fields, pairs of operands, sizes that change together, buffers, operators, and steps."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from optimum_neuron.kernels.steps.access import ALL_SIZES


Plan = dict[str, Any]
# What no plan may call, and what changes memory that is not its own or reads what it does not check.
_UNSAFE = """
    aten.set_.source_Tensor aten.resize_.default aten.as_strided_.default aten.from_file.default aten._embedding_bag_dense_backward.default
    aten.adaptive_max_pool2d_backward.default aten.segment_reduce.default aten._ctc_loss.default aten._convert_indices_from_csr_to_coo.default
    aten.max_unpool2d.default aten.copy_.default prims.empty.default
"""
UNSAFE = tuple(_UNSAFE.split())
_DTYPES = tuple(ALL_SIZES)
_KINDS = ("input", "output", "tensor", "constant", "kept", "arena")
_WRONG: tuple[Any, ...] = (
    None, True, "", "x", -1, 0, 1, 7, 2**31, 2**40, 2**62, 2**63, 10**30, 1.5, [], {}, [1], [[]], {"tensor": None}, {"dtype": "x"},
    {"number": []}, "inf", "nan",
)  # fmt: skip


def mutated(plan: Plan, seed: int) -> tuple[Plan, list[str]]:
    """A copy of a plan with one to three changes, and their kinds; the same for the same seed."""
    choice, changed = random.Random(seed), copy.deepcopy(plan)
    changes = choice.choices(_CHANGES, k=choice.choice((1, 1, 1, 2, 2, 3)))
    for change in changes:
        with suppress(TypeError, KeyError, IndexError, AttributeError, ValueError):  # an earlier change left nothing
            change(changed, choice)
    return changed, [change.__name__.lstrip("_") for change in changes]


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Every container in a value with each of its keys."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)


def _is_operand(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"buffer", "dtype", "offset", "shape", "strides"}


def _operands(value: Any) -> list[Plan]:
    return [inner for holder, key in _places(value) if _is_operand(inner := holder[key])]


def _step(plan: Plan, choice: random.Random) -> Plan:
    """A step, of each kind as often as of any other."""
    kinds: dict[str, list[Plan]] = {}
    for step in (*plan["once"], *plan["steps"]):
        if isinstance(step, dict) and step:
            kinds.setdefault(str(step.get("kind")) + str(step.get("operator")), []).append(step)
    return choice.choice(kinds[choice.choice(sorted(kinds))]) if kinds else plan


def _value(own: Any, plan: Plan, choice: random.Random) -> Any:
    """What may stand in place of a value."""
    if isinstance(own, int) and not isinstance(own, bool) and choice.random() < 0.7:
        near = (own + 1, own - 1, own * 2, own // 2, -own, own + 64, own * 64, len(plan["buffers"]) - 1)
        return choice.choice(near)
    if isinstance(own, str) and choice.random() < 0.7:
        return choice.choice((*_DTYPES, *_KINDS, *UNSAFE))
    return copy.deepcopy(choice.choice(_WRONG))


def _field(plan: Plan, choice: random.Random) -> None:
    """One field of a step."""
    holder, key = choice.choice(list(_places(_step(plan, choice))))
    holder[key] = _value(holder[key], plan, choice)


def _remove(plan: Plan, choice: random.Random) -> None:
    holder, key = choice.choice(list(_places(_step(plan, choice))))
    del holder[key]


def _pair(plan: Plan, choice: random.Random) -> None:
    """An operand where another one of its step lies, at a place that is not far from it."""
    moved, onto = choice.sample(_operands(_step(plan, choice)), 2)
    moved["buffer"] = onto["buffer"]
    if choice.random() < 0.7:
        moved["offset"] = choice.choice((0, 1, 4, 64, onto["offset"]))


def _exchange(plan: Plan, choice: random.Random) -> None:
    """Two operands of one step, or one of any other step."""
    step = _step(plan, choice)
    others = _operands(step) if choice.random() < 0.5 else _operands(_step(plan, choice))
    left, right = choice.choice(_operands(step)), choice.choice(others)
    before, other = dict(left), dict(right)
    left.update(other)
    if choice.random() < 0.5:
        right.update(before)


def _together(plan: Plan, choice: random.Random) -> None:
    """A number of a step, wherever it has it."""
    step = _step(plan, choice)
    found = [(holder, key) for holder, key in _places(step) if type(holder[key]) is int]
    holder, key = choice.choice(found)
    own = holder[key]
    to = choice.choice((0, 1, own + 1, own * 2, own * 1000, 2**31, 2**40, 2**62))
    for inner, name in found:
        if inner[name] == own:
            inner[name] = to
    if choice.random() < 0.5:  # a size of any number of elements that takes no memory
        for operand in _operands(step):
            for dim, size in enumerate(operand["shape"][: len(operand["strides"])]):
                operand["strides"][dim] = 0 if size == to else operand["strides"][dim]


def _buffer(plan: Plan, choice: random.Random) -> None:
    """A field of a buffer, or the place of another one in memory."""
    buffer, other = choice.choice(plan["buffers"]), choice.choice(plan["buffers"])
    if choice.random() < 0.5:
        buffer.update({key: other[key] for key in ("kind", "name", "offset")})
    else:
        key = choice.choice(sorted(buffer))
        buffer[key] = choice.choice(_KINDS) if key == "kind" else _value(buffer[key], plan, choice)


def _top(plan: Plan, choice: random.Random) -> None:
    key = choice.choice(sorted(plan))
    if key == "arena":
        plan[key] = _value(plan[key], plan, choice)
    else:
        plan[key] = choice.choice(([], {}, None, plan[key][::-1], plan[key] * 2))


def _operator(plan: Plan, choice: random.Random) -> None:
    """Another operator of a call, of the plan's own or none that one may call."""
    calls = [step for step in (*plan["once"], *plan["steps"]) if step.get("kind") == "TorchCall"]
    call = choice.choice(calls)
    call["operator"] = choice.choice((*UNSAFE, *(each["operator"] for each in calls)))
    if choice.random() < 0.3:
        call["outputs"] = []


def _order(plan: Plan, choice: random.Random) -> None:
    """Steps in another order, one more or fewer of them, or computed once that belong to each run."""
    steps = plan["steps"]
    first, second = sorted(choice.sample(range(len(steps)), 2))
    kind = choice.choice(("swap", "swap", "move", "drop", "repeat", "once"))
    if kind == "swap":
        second = first + 1 if choice.random() < 0.5 else second
        steps[first], steps[second] = steps[second], steps[first]
    elif kind == "repeat":
        steps.insert(second, copy.deepcopy(steps[first]))
    else:
        step = steps.pop(second)
        {"move": steps, "once": plan["once"], "drop": []}[kind].insert(0, step)


def _share(plan: Plan, choice: random.Random) -> None:
    """Two buffers of the arena in one place, or in a part of it."""
    held = [each for each in plan["buffers"] if each["kind"] == "arena" and each["bytes"]]
    moved, onto = choice.sample(held, 2)
    moved["offset"] = onto["offset"] + choice.choice((0, 0, 64))


_CHANGES: tuple[Callable[[Plan, random.Random], None], ...] = (
    _field, _field, _field, _remove, _pair, _pair, _pair, _exchange, _exchange, _together, _together, _buffer, _buffer, _top,
    _operator, _order, _order, _order, _share,
)  # fmt: skip
