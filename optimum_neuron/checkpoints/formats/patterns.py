# SPDX-License-Identifier: Apache-2.0
"""Regular expressions of a checkpoint's config, matched in bounded time: somebody else wrote them.

`re` tries one way through an expression after the other, which may be exponentially many. Here all places of a name that an
expression may have come to are followed at once, as the bits of a whole number, so that work grows with their number alone:
https://swtch.com/~rsc/regexp/regexp1.html.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache


_LONGEST = 2000  # characters of an expression, and of a name
_MOST_STEPS = 100_000  # some tenths of a second
_REPEATS = re.compile(r"([*+?]|\{(?=[\d,])(\d*)(,?)(\d*)\})\??(\+?)")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
# Pieces that are one character, or none (\b), whatever stands around them.
_ESCAPE = re.compile(r"\\[^0-9xuUN]", re.DOTALL)
_GROUPS = re.compile(r"\((?:\?(?:P<\w+>|[:=!]))?(?!\?)")


class _TooManyStepsError(Exception):
    pass


# From places in a name (bit i: before its character i) to the places behind what is matched from there.
_Step = Callable[["_Name", int], int]


class _Name:
    """A name, and how much work has been spent on it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._left = _MOST_STEPS
        self._places: dict[str, tuple[int, bool]] = {}

    def spend(self, steps: int = 1) -> None:
        self._left -= steps
        if self._left < 0:
            raise _TooManyStepsError

    def behind(self, piece: str, places: int) -> int:
        """Where an expression of one character, or of none, ends that begins at one of these places."""
        if piece not in self._places:
            self.spend(len(self.text) + 1)
            compiled = re.compile(piece)
            found = [compiled.match(self.text, place) for place in range(len(self.text) + 1)]
            bits = sum(1 << place for place, match in enumerate(found) if match is not None)
            self._places[piece] = bits, any(match is not None and match.group() for match in found)
        bits, takes = self._places[piece]
        return (places & bits) << takes


def begins(pattern: str, name: str) -> bool:
    """Whether a name begins with what a regular expression describes, as `re.match` tells.

    Raises:
        ValueError: it is none; or it, or the name, is too long, or has parts that are not read: references to groups, flags, what
            looks behind, and repeats that give nothing back.
    """
    where = f"quantization_config has the pattern {pattern[:100]!r}"
    if max(len(pattern), len(name)) > _LONGEST:
        raise ValueError(
            f"{where} of {len(pattern):,} characters for a name of {len(name):,}, and both may have {_LONGEST:,}; correct config.json"
        )
    try:
        return bool(_parsed(pattern)(_Name(name), 1))
    except (re.error, RecursionError, OverflowError) as error:
        told = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{where}: {told}; correct config.json") from error
    except _TooManyStepsError as error:
        raise ValueError(
            f"{where}, which takes more than {_MOST_STEPS:,} steps for the name {name[:100]!r}; nest fewer repeats in config.json"
        ) from error


@lru_cache(maxsize=256)
def _parsed(pattern: str) -> _Step:
    re.compile(pattern)  # so that what follows meets no syntax error
    step, end = _either(pattern, 0)
    assert end == len(pattern)
    return step


def _either(pattern: str, place: int) -> tuple[_Step, int]:
    """Alternatives, up to the end of their group; and where that is."""
    choices = []
    while True:
        parts: list[_Step] = []
        while place < len(pattern) and pattern[place] not in "|)":
            part, place = _one(pattern, place)
            part, place = _repeated(pattern, place, part)
            parts.append(part)
        choices.append(_in_turn(parts))
        if place == len(pattern) or pattern[place] == ")":
            return _any_of(choices), place
        place += 1


def _one(pattern: str, place: int) -> tuple[_Step, int]:
    """A group, or a piece that takes at most one character."""
    if pattern[place] == "(":
        opening = _GROUPS.match(pattern, place)
        if opening is None:
            raise re.error(f"what begins with {pattern[place : place + 4]!r} is not read", pattern, place)
        step, end = _either(pattern, opening.end())
        if opening.group() in ("(?=", "(?!"):
            step = _ahead(step, wanted=opening.group() == "(?=")
        return step, end + 1
    kinds = {"[": _CLASS, "\\": _ESCAPE}
    piece = kinds[pattern[place]].match(pattern, place) if pattern[place] in kinds else None
    if piece is None and pattern[place] == "\\":
        raise re.error(f"what begins with {pattern[place : place + 2]!r} is not read", pattern, place)
    taken = piece.group() if piece is not None else pattern[place]
    source = r"\{" if taken == "{" else taken
    return lambda name, places: name.behind(source, places), place + len(taken)


def _repeated(pattern: str, place: int, step: _Step) -> tuple[_Step, int]:
    found = _REPEATS.match(pattern, place)
    if found is None:
        return step, place
    sign, low, comma, high, keeps = found.groups()
    if keeps:
        raise re.error(f"the repeat {found.group()!r} is not read", pattern, place)
    least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(sign, (int(low or 0), int(high) if high else None))
    if sign.startswith("{") and not comma:
        most = least
    return _repeat(step, least, most), found.end()


def _in_turn(parts: list[_Step]) -> _Step:
    def step(name: _Name, places: int) -> int:
        for part in parts:
            name.spend()
            places = part(name, places)
            if not places:
                break
        return places

    return step


def _any_of(choices: list[_Step]) -> _Step:
    def step(name: _Name, places: int) -> int:
        found = 0
        for choice in choices:
            name.spend()
            found |= choice(name, places)
        return found

    return choices[0] if len(choices) == 1 else step


def _repeat(part: _Step, least: int, most: int | None) -> _Step:
    def step(name: _Name, places: int) -> int:
        for _ in range(least):
            name.spend()
            before, places = places, part(name, places)
            if places == before:  # and so after any further one
                break
        new, count = places, 0
        while new and (most is None or count < most - least):
            name.spend()
            new = part(name, new) & ~places
            places |= new
            count += 1
        return places

    return step


def _ahead(part: _Step, *, wanted: bool) -> _Step:
    def step(name: _Name, places: int) -> int:
        return sum(place for place in _bits(places) if bool(part(name, place)) == wanted)

    return step


def _bits(places: int) -> Iterator[int]:
    while places:
        lowest = places & -places
        yield lowest
        places ^= lowest
