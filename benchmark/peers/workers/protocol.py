# SPDX-License-Identifier: Apache-2.0
"""A worker's side of the conversation: JSON lines in, one JSON line out for each. Needs the standard library alone.

    {"do": "convert", "checkpoint": ..., "precision": ..., "folder": ..., "sizes": ...}   -> {"seconds": ...}
    {"do": "load", "folder": ..., "precision": ..., "threads": ..., "sizes": ...}         -> {"seconds": ...}
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


Prompt = list[int]


class UnsupportedError(Exception):
    """The runtime has no such thing; the message tells what."""


@dataclass(frozen=True)
class Sizes:
    """What a runtime is to hold.

    Attributes:
        batches: numbers of rows that decode together, ascending; the last one is also the requests served at a time.
        length: tokens of the longest row, prompt and new tokens.
    """

    batches: tuple[int, ...]
    length: int

    @property
    def slots(self) -> int:
        return self.batches[-1]


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


class Runtime(Protocol):
    """What a worker drives. No text ends early, nothing is sampled, and no prefix is kept from call to call."""

    def versions(self) -> dict[str, str]: ...

    def convert(self, checkpoint: str, precision: str, folder: str, sizes: Sizes) -> float | None:
        """Writes into a folder what `load` reads; seconds, or None where it was there already."""

    def load(self, folder: str, precision: str, threads: int, sizes: Sizes) -> None: ...

    def generate(self, prompts: Sequence[Prompt], new_tokens: int) -> Generated:
        """Prompts are of one length."""

    def serve(self, requests: Sequence[tuple[Prompt, int]]) -> int:
        """Serves all requests, which are there at once, and counts their new tokens."""


def run(make: Callable[[], Runtime]) -> None:
    """Answers stdin's lines until it is closed.

    Args:
        make: imports the runtime's packages.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    runtime = make()
    _say(answers, {"versions": runtime.versions()})
    for line in sys.stdin:
        _say(answers, _answer(runtime, json.loads(line)))


def _say(answers: Any, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _answer(runtime: Runtime, asked: dict[str, Any]) -> dict[str, Any]:
    try:
        return _do(runtime, asked.pop("do"), asked)
    except UnsupportedError as error:
        return {"unsupported": str(error)}
    except Exception as error:  # the other side decides what a failure means
        traceback.print_exc()
        first = str(error).strip().partition("\n")[0]
        return {"error": f"{type(error).__name__}: {first}"}


def _do(runtime: Runtime, what: str, asked: dict[str, Any]) -> dict[str, Any]:
    if "sizes" in asked:
        sizes = asked.pop("sizes")
        asked["sizes"] = Sizes(tuple(sizes["batches"]), sizes["length"])
    start = time.perf_counter()
    if what == "convert":
        return {"seconds": runtime.convert(**asked)}
    if what == "load":
        runtime.load(**asked)
        return {"seconds": time.perf_counter() - start}
    if what == "generate":
        generated = runtime.generate(**asked)
        return {"first_s": generated.first_s, "rest_s": generated.rest_s, "tokens": generated.tokens}
    if what == "serve":
        tokens = runtime.serve([(prompt, new_tokens) for prompt, new_tokens in asked["requests"]])
        return {"seconds": time.perf_counter() - start, "tokens": tokens}
    raise ValueError(f"a worker cannot {what!r}; it can convert, load, generate and serve")
