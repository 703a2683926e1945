# SPDX-License-Identifier: Apache-2.0
"""A worker's side of the conversation: JSON lines in, one JSON line out for each. Needs the standard library alone.

    {"do": "convert", "checkpoint": ..., "folder": ..., "precision": ..., "sizes": ...}                -> {"seconds": ...}
    {"do": "load", "checkpoint": ..., "folder": ..., "precision": ..., "threads": ..., "sizes": ...}   -> {"seconds": ...}
    {"do": "generate", "prompts": [[...]], "new_tokens": ...}  -> {"first_s": ..., "rest_s": ..., "tokens": [[...]]}
    {"do": "serve", "requests": [[[...], new_tokens]]}         -> {"seconds": ..., "tokens": ...}

What fails is answered with {"error": ...}, what the runtime has not with {"unsupported": ...}. The first line, {"versions": ...},
comes when everything is imported.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


Prompt = list[int]


class UnsupportedError(Exception):
    """The runtime has no such thing; the message says what."""


@dataclass(frozen=True)
class Sizes:
    """What a runtime is to hold.

    Attributes:
        batches: numbers of rows that decode together, ascending.
        slots: requests that are served at a time.
        length: tokens of the longest row, prompt and new tokens.
    """

    batches: Sequence[int]
    slots: int
    length: int


@dataclass(frozen=True)
class Generated:
    """Greedy tokens of rows that decode together.

    Attributes:
        first_s: seconds from the call until every row has its first token.
        rest_s: seconds for the others: one step for each, all rows in it.
        tokens: of each row, as many as were asked for.
    """

    first_s: float
    rest_s: float
    tokens: list[list[int]]


class Runtime(ABC):
    """A runtime that a worker drives. No text ends early, nothing is sampled, and no prefix is kept from call to call."""

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Return the versions of what it imported."""

    def convert(self, checkpoint: str, folder: str, precision: str, sizes: Sizes) -> float | None:
        """Write into a folder what `load` reads; return seconds, or None where it was there already."""
        return 0.0  # it reads the checkpoint itself

    @abstractmethod
    def load(self, checkpoint: str, folder: str, precision: str, threads: int, sizes: Sizes) -> None:
        """Load what `convert` wrote, or the checkpoint."""

    @abstractmethod
    def generate(self, prompts: Sequence[Prompt], new_tokens: int) -> Generated:
        """Generate from prompts of one length."""

    def serve(self, requests: Sequence[tuple[Prompt, int]]) -> int:
        """Serve all requests, which are there at once; return how many new tokens they got."""
        raise UnsupportedError("rows of a batch begin and end together: it does not serve requests of mixed lengths")


def run(make: Callable[[], Runtime]) -> None:
    """Answer stdin's lines until it is closed.

    Args:
        make: imports the runtime's packages.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    runtime = make()
    say({"versions": runtime.versions()})
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            say(_answer(runtime, asked.pop("do"), asked))
        except UnsupportedError as error:
            say({"unsupported": str(error)})
        except Exception as error:  # the other side decides what a failure means
            traceback.print_exc()
            first = str(error).strip().partition("\n")[0]
            say({"error": f"{type(error).__name__}: {first}"})


def _answer(runtime: Runtime, what: str, asked: dict[str, Any]) -> dict[str, Any]:
    if "sizes" in asked:
        asked["sizes"] = Sizes(**asked["sizes"])
    start = time.perf_counter()
    if what == "convert":
        return {"seconds": runtime.convert(**asked)}
    if what == "load":
        runtime.load(**asked)
        return {"seconds": time.perf_counter() - start}
    if what == "generate":
        return asdict(runtime.generate(**asked))
    if what == "serve":
        tokens = runtime.serve([(prompt, new_tokens) for prompt, new_tokens in asked["requests"]])
        return {"seconds": time.perf_counter() - start, "tokens": tokens}
    raise ValueError(f"a worker cannot {what!r}; it can convert, load, generate and serve")
