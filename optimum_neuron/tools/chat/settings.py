# SPDX-License-Identifier: Apache-2.0
"""Options of answers, for commands and for a chat: their length, and the choice of their tokens. Imports no torch."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from typing import Any

from ...cli import add_option
from ...runtime.refused import sampling_keywords


# The least and the most of each, and both in words. NaN is in no range.
_RANGES = {
    "max_new_tokens": (1, sys.maxsize, "1 or more"),
    "temperature": (0.0, sys.float_info.max, "0 or more, and finite"),
    "top_k": (1, 2**31 - 1, f"1 or more, and at most {2**31 - 1}"),
    "top_p": (sys.float_info.min, 1.0, "above 0, and at most 1"),
    "seed": (0, 2**32 - 1, f"0 or more, and at most {2**32 - 1}"),
}
# The longest answer by default: it leaves room for others in the slot.
DEFAULT_NEW_TOKENS = 512


@dataclass(frozen=True)
class Settings:
    """The options of answers; None leaves one to the checkpoint's generation_config.json, or to the program."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    @classmethod
    def from_args(cls, args: Namespace) -> Settings:
        """Return the settings of a command line; raise ValueError where one is out of range, or has no meaning with the others."""
        settings = cls(**{name: getattr(args, name) for name in _RANGES})
        for name, (least, most, words) in _RANGES.items():
            value = getattr(settings, name)
            if value is not None and not least <= value <= most:
                raise ValueError(f"--{name.replace('_', '-')} {value} must be {words}")
        shaping = next((name for name in ("top_k", "top_p") if getattr(settings, name) is not None), None)
        if shaping is not None and not settings.temperature:
            name = shaping.replace("_", "-")
            raise ValueError(f"--{name} shapes sampling: give a --temperature above 0 with it")
        return settings

    def generate_keywords(self) -> dict[str, Any]:
        return sampling_keywords(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


def add_settings_options(parser: ArgumentParser) -> None:
    length_help = f"longest answer (default: the checkpoint's own, or {DEFAULT_NEW_TOKENS}; at most what the sequence length leaves)"
    add_option(parser, "--max-new-tokens", type=int, metavar="TOKENS", help=length_help)
    heat_help = "above 0: sample; higher values vary more (default: the checkpoint's own, or 0)"
    parser.add_argument("--temperature", type=float, help=heat_help)
    add_option(parser, "--top-k", type=int, metavar="K", help="sample from the K most probable tokens only")
    add_option(parser, "--top-p", type=float, metavar="P", help="sample from the tokens that make up P, up to 1, only")
    parser.add_argument("--seed", type=int, help="start of the random numbers, for an answer that can be repeated")
