# SPDX-License-Identifier: Apache-2.0
"""How long answers may be and how their tokens are chosen: as options of commands, and as values that change while one chats. Imports no torch."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..cli import add_option
from ..runtime.asked_sampling import sampling_keywords


# The least and the most of each, and both in words; what is no number lies between none.
_RANGES: Mapping[str, tuple[float, float, str]] = MappingProxyType(
    {
        "max_new_tokens": (1, sys.maxsize, "1 or more"),
        "temperature": (0.0, sys.float_info.max, "0 or more, and finite"),
        "top_k": (1, 2**31 - 1, f"1 or more, and at most {2**31 - 1}"),
        "top_p": (sys.float_info.min, 1.0, "above 0, and at most 1"),
        "seed": (0, 2**32 - 1, f"0 or more, and at most {2**32 - 1}"),
    }
)
_SHAPES_SAMPLING = ("top_k", "top_p")
UNSET = "none"
# Of an answer where nothing is said: long enough for one, and short enough to leave the slot room for others.
DEFAULT_NEW_TOKENS = 512


@dataclass(frozen=True)
class Settings:
    """Of answers; None leaves a choice to the program, or to the checkpoint's generation_config.json.

    Attributes:
        max_new_tokens: the longest answer.
        temperature: 0 takes the most probable token each time; above, tokens are drawn. None: as the checkpoint says.
        top_k, top_p: which tokens are drawn from.
        seed: start of the random numbers.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    @classmethod
    def of(cls, args: Namespace) -> Settings:
        """Those of a command line.

        Raises:
            ValueError: one is out of range, or has no meaning beside the others.
        """
        settings = cls(**{name: getattr(args, name) for name in _RANGES})
        settings.check("--")
        return settings

    def check(self, mark: str = "") -> None:
        """Raises ValueError where one is out of range, or has no meaning beside the others.

        Args:
            mark: what stands before a name where the user writes it.
        """
        for name, (least, most, words) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ValueError(f"{mark}{_spelled(name)} {value} must be {words}")
        shaping = next((name for name in _SHAPES_SAMPLING if getattr(self, name) is not None), None)
        if shaping is not None and not self.temperature:
            raise ValueError(f"{mark}{_spelled(shaping)} shapes sampling: give a {mark}temperature above 0 with it")

    def with_value(self, name: str, text: str) -> Settings:
        """A copy in which one value, by its name as `names` has it, is what a text says; `none` leaves it to the program again.

        Raises:
            ValueError: there is no such value, or the text is none for it.
        """
        key = name.replace("-", "_")
        if key not in _RANGES:
            near = difflib.get_close_matches(name, names(), 1)
            raise ValueError(f"{name!r} cannot be set; {f'did you mean {near[0]}?' if near else one_of(names())}")
        kind = float if key in ("temperature", "top_p") else int
        try:
            value = None if text == UNSET else kind(text)
        except ValueError:
            what = "a number" if kind is float else "a whole number"
            raise ValueError(f"{name} cannot be {text!r}; give {what}, or {UNSET!r}") from None
        values: dict[str, Any] = {key: value}
        changed = dataclasses.replace(self, **values)
        changed.check()
        return changed

    def told(self) -> dict[str, str]:
        """Name and value of each, as `with_value` takes them."""
        values = ((name, getattr(self, name)) for name in _RANGES)
        return {_spelled(name): UNSET if value is None else str(value) for name, value in values}

    def keywords(self) -> dict[str, Any]:
        """Keywords of `generate` by which tokens are chosen; what is not set is left to the checkpoint's defaults."""
        return sampling_keywords(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


def names() -> list[str]:
    """What may be set."""
    return [_spelled(name) for name in _RANGES]


def one_of(choices: list[str]) -> str:
    """The end of a message."""
    return f"choose one of {', '.join(choices)}"


def _spelled(name: str) -> str:
    return name.replace("_", "-")


def add_settings_options(parser: ArgumentParser) -> None:
    """Adds the options that `Settings.of` reads."""
    add_option(
        parser,
        "--max-new-tokens",
        type=int,
        metavar="TOKENS",
        help=f"longest answer (default: the checkpoint's own, or {DEFAULT_NEW_TOKENS}; at most what the sequence length leaves)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        help="above 0: sample, the more freely the higher (default: the checkpoint's own, or 0)",
    )
    add_option(parser, "--top-k", type=int, metavar="K", help="sample from the K most probable tokens only")
    add_option(parser, "--top-p", type=float, metavar="P", help="sample from the tokens that make up P, up to 1, only")
    parser.add_argument("--seed", type=int, help="start of the random numbers, for an answer that can be repeated")
