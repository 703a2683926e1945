# SPDX-License-Identifier: Apache-2.0
"""The names of what a layer has, its weights and its states, in layers that are the same."""

from __future__ import annotations

import re
from collections.abc import Callable

from ..layer_recorder import CALLS_APART
from .alike import Kind


Rename = Callable[[str], str]
_STATE = re.compile(r"(kv_cache\.[a-z]+_)(\d+)((?:_\d+)?)")


class NotAlikeError(Exception):
    """Layers that look the same were traced to other nodes, or to nodes that others need: all have to be traced."""


def has(kind: Kind, member: int, name: str) -> bool:
    """Whether a tensor of a step is one that `renaming` knows as a layer's."""
    if name.startswith(_prefix(kind, member)):
        return True
    match = _STATE.fullmatch(name)
    return match is not None and int(match[2]) % CALLS_APART in kind.values(member).values()


def renaming(kind: Kind, origin: int, member: int) -> Rename:
    """From the names of what a layer has to those of what another one has; other weights stay.

    Raises:
        NotAlikeError: by their numbers it is open which; the result raises it for a state of neither.
    """
    numbers: dict[int, int] = {}
    values = kind.values(member)
    for place, number in kind.values(origin).items():
        if numbers.setdefault(number, values[place]) != values[place]:
            raise NotAlikeError
    own, others = _prefix(kind, origin), _prefix(kind, member)

    def state(match: re.Match[str]) -> str:
        calls, number = divmod(int(match[2]), CALLS_APART)
        if number not in numbers:
            raise NotAlikeError
        return f"{match[1]}{numbers[number] + calls * CALLS_APART}{match[3]}"

    def rename(name: str) -> str:
        if name.startswith(own):
            return others + name.removeprefix(own)
        return _STATE.sub(state, name) if _STATE.fullmatch(name) else name

    return rename


def _prefix(kind: Kind, member: int) -> str:
    return f"model.{kind.path}.{member}."
