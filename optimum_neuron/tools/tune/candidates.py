# SPDX-License-Identifier: Apache-2.0
"""The grid of sizes that a search compares, and the commands that export and serve one of them. Needs no torch."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ...config import HLO_TARGETS, NeuronConfig
from ...engine.policy import Policy, resolve_policy
from ...export.first_use import option_words


POLICIES = ("mixed", "alternate")
BUCKETS = ("none", "quarters", "halves")
_SMALLEST_CONTEXT = 256


@dataclass(frozen=True)
class Candidate:
    """A config; its mixed graphs decide the policy, as for `serve`."""

    config: NeuronConfig

    @property
    def policy(self) -> Policy:
        return resolve_policy("auto", self.config.mixed_step)

    def __str__(self) -> str:
        sizes = self.config
        return (
            f"{sizes.batch_size} rows, chunks of {sizes.ctx_batch_size} x {sizes.prefill_chunk_size}, contexts "
            f"{'/'.join(map(str, sizes.context_buckets))}, {self.policy}"
        )


@dataclass(frozen=True)
class SizeGrid:
    """Values of each axis.

    As buckets, "none" is the sequence length alone, "halves" and "quarters" also as many of its parts down to 256, and numbers
    joined by `+` are contexts below it.
    """

    batch: tuple[int, ...]  # batch_size
    chunk: tuple[int, ...]  # prefill_chunk_size
    ctx: tuple[int, ...]  # ctx_batch_size
    buckets: tuple[str, ...]
    policy: tuple[str, ...]  # "mixed" has the graphs for it, "alternate" leaves them out

    @classmethod
    def for_target(cls, target: str) -> SizeGrid:
        """Return the default grid; on the host's CPU, rows of a chunk and contexts cost what is in use, so one of each."""
        if target in HLO_TARGETS:
            return cls((4, 8, 16, 32, 64), (128, 256, 512, 1024), (1, 2), ("none", "quarters"), POLICIES)
        return cls((4, 8, 16), (32, 64, 128, 256), (1,), ("none",), POLICIES)

    def replace_axes(self, words: Sequence[str]) -> SizeGrid:
        """Return a grid with axes given as `batch=4,8`; raise ValueError where one is unknown or given twice."""
        found: dict[str, tuple[Any, ...]] = {}
        axes = tuple(vars(self))
        for word in words:
            axis, equals, values = word.partition("=")
            if axis not in axes or not equals or axis in found:
                raise ValueError(
                    f"--search {word!r} is no axis that is given once; give axes as batch=4,8 out of {', '.join(axes)}"
                )
            found[axis] = tuple(dict.fromkeys(_parse_value(axis, value, word) for value in values.split(",")))
        return SizeGrid(**{**vars(self), **found})

    def make_candidates(self, fixed: Mapping[str, Any]) -> tuple[list[Candidate], list[str]]:
        """Return all that can be exported with fixed options, and why others cannot; raise ValueError if none can."""
        found, refused = dict[Candidate, None](), list[str]()
        for batch, chunk, ctx, buckets, policy in product(self.batch, self.chunk, self.ctx, self.buckets, self.policy):
            options = {
                "batch_size": batch,
                "prefill_chunk_size": chunk,
                "ctx_batch_size": ctx,
                "context_buckets": _context_buckets(buckets, fixed["sequence_length"]),
                "mixed_step": policy == "mixed",
            }
            try:
                found[Candidate(NeuronConfig.from_dict({**fixed, **options}))] = None
            except ValueError as error:
                refused.append(str(error))
        if not found:
            raise ValueError(refused[0])
        return list(found), refused


def _parse_value(axis: str, value: str, word: str) -> int | str:
    known = {"buckets": BUCKETS, "policy": POLICIES}.get(axis, ())
    numbers = value.split("+") if axis == "buckets" else [value]
    if value in known:
        return value
    if axis == "policy" or not all(number.isdecimal() and int(number) for number in numbers):
        what = f"one of {', '.join(known)}" if known else "whole numbers of at least 1"
        more = " or lengths as 512+2048" if axis == "buckets" else ""
        raise ValueError(f"--search {word!r} has {value!r}; give {what}{more}")
    return value if axis == "buckets" else int(value)


def _context_buckets(buckets: str, length: int) -> tuple[int, ...]:
    if buckets not in BUCKETS:
        return tuple(sorted({*(int(number) for number in buckets.split("+")), length}))
    found, part = [length], {"none": length + 1, "quarters": 4, "halves": 2}[buckets]
    while found[0] // part >= _SMALLEST_CONTEXT:
        found.insert(0, found[0] // part)
    return tuple(found)


def export_words(model: str, config: NeuronConfig, output: str, others: Sequence[str] = ()) -> str:
    """Return the command line that exports a config; `others` name the model more closely."""
    words = ["optimum-cli", "export", "neuron", "--model", model, *others, *option_words(config)]
    return shlex.join([*words, output])


def serve_words(output: str, longest_queue: int) -> str:
    """Return the command line that serves it by the simulated scheduler, with room for all requests of the trace."""
    words = ["optimum-cli", "neuron", "serve", output, "--backend", "engine"]
    if longest_queue > 128:  # which `serve` lets wait by default
        words += ["--max-queue", str(longest_queue)]
    return shlex.join(words)
