# SPDX-License-Identifier: Apache-2.0
"""The length of answers and the choice of their tokens: options of commands, and values that change in a chat. Imports no torch."""

from __future__ import annotations

import dataclasses
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from typing import Any

from ...cli import add_option
from ...runtime.asked_sampling import sampling_keywords


# The least and the most of each, and both in words. NaN is in no range.
_RANGES = {
    "max_new_tokens": (1, sys.maxsize, "1 or more"),
    "temperature": (0.0, sys.float_info.max, "0 or more, and finite"),
    "top_k": (1, 2**31 - 1, f"1 or more, and at most {2**31 - 1}"),
    "top_p": (sys.float_info.min, 1.0, "above 0, and at most 1"),
    "seed": (0, 2**32 - 1, f"0 or more, and at most {2**32 - 1}"),
}
_SHAPES_SAMPLING = ("top_k", "top_p")
UNSET = "none"
# The longest answer by default: it leaves room for others in the slot.
DEFAULT_NEW_TOKENS = 512


@dataclass(frozen=True)
class Settings:
    """The options of answers; None leaves one to the checkpoint's generation_config.json, or to the program.

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
        """Return those of a command line.

        Raises:
            ValueError: one is out of range, or has no meaning with the others.
        """
        settings = cls(**{name: getattr(args, name) for name in _RANGES})
        settings.check("--")
        return settings

    def check(self, mark: str = "") -> None:
        """Raise ValueError where one is out of range, or has no meaning with the others.

        Args:
            mark: stands before a name where the user writes it.
        """
        for name, (least, most, words) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ValueError(f"{mark}{_spelled(name)} {value} must be {words}")
        shaping = next((name for name in _SHAPES_SAMPLING if getattr(self, name) is not None), None)
        if shaping is not None and not self.temperature:
            raise ValueError(f"{mark}{_spelled(shaping)} shapes sampling: give a {mark}temperature above 0 with it")

    def with_value(self, assignment: str) -> Settings:
        """Return a copy with one other value, as in `top-k 5` or `top-k=5`; `none` leaves it to the checkpoint.

        Raises:
            ValueError: there is no such value, or it is out of range.
        """
        name, _, value = assignment.replace("=", " ", 1).partition(" ")
        key, value = name.replace("-", "_"), value.strip()
        if key not in _RANGES:
            raise ValueError(f"{name!r} cannot be set; choose one of {', '.join(map(_spelled, _RANGES))}")
        kind = float if key in ("temperature", "top_p") else int
        try:
            values: dict[str, Any] = {key: None if value == UNSET else kind(value)}
        except ValueError:
            what = "a number" if kind is float else "a whole number"
            raise ValueError(f"{name} cannot be {value!r}; give {what}, or {UNSET!r}") from None
        changed = dataclasses.replace(self, **values)
        changed.check()
        return changed

    def __str__(self) -> str:
        """Return names and values, as `with_value` takes them."""
        values = ((name, getattr(self, name)) for name in _RANGES)
        return ", ".join(f"{_spelled(name)} {UNSET if value is None else value}" for name, value in values)

    def keywords(self) -> dict[str, Any]:
        """Return the keywords of `generate` that choose tokens so; the checkpoint's defaults speak for the others."""
        return sampling_keywords(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


def _spelled(name: str) -> str:
    return name.replace("_", "-")


def add_settings_options(parser: ArgumentParser) -> None:
    """Add the options that `Settings.of` reads."""
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
