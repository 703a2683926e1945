# SPDX-License-Identifier: Apache-2.0
"""What could be exported: the grid of sizes that a search compares, and the commands that export and serve one of them. Needs no torch."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ...config import HLO_TARGETS, NeuronConfig
from ...engine.policy import Policy, resolve_policy


# As `serve` has it: how many may wait for a slot before others are told to come again.
DEFAULT_QUEUE = 128
POLICIES = ("mixed", "alternate")
BUCKETS = ("none", "quarters", "halves")
_SMALLEST_CONTEXT = 256


@dataclass(frozen=True)
class Candidate:
    """A config, of whose mixed graphs the policy follows: what `serve` does with it."""

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
class Grid:
    """Values of each axis.

    Attributes:
        batch, chunk, ctx: batch_size, prefill_chunk_size and ctx_batch_size.
        buckets: of contexts: "none" is the sequence length alone, "halves" and "quarters" also as many of its parts down to 256,
            and numbers joined by `+` are contexts below it.
        policy: "mixed" has the graphs for it, "alternate" leaves them out.
    """

    batch: tuple[int, ...]
    chunk: tuple[int, ...]
    ctx: tuple[int, ...]
    buckets: tuple[str, ...]
    policy: tuple[str, ...]

    @classmethod
    def of(cls, target: str) -> Grid:
        """What is compared unless somebody chooses: on the host's CPU, where rows of a chunk and contexts cost what is in use of them,
        one of each."""
        if target in HLO_TARGETS:
            return cls((4, 8, 16, 32, 64), (128, 256, 512, 1024), (1, 2), ("none", "quarters"), POLICIES)
        return cls((4, 8, 16), (32, 64, 128, 256), (1,), ("none",), POLICIES)

    def replaced(self, words: Sequence[str]) -> Grid:
        """With axes given as `batch=4,8`.

        Raises:
            ValueError: an axis or a value is not known, or an axis is given twice.
        """
        found: dict[str, tuple[Any, ...]] = {}
        axes = tuple(vars(self))
        for word in words:
            axis, equals, values = word.partition("=")
            if axis not in axes or not equals or axis in found:
                raise ValueError(
                    f"--search {word!r} is no axis that is given once; give axes as batch=4,8 out of {', '.join(axes)}"
                )
            found[axis] = tuple(dict.fromkeys(_value(axis, value, word) for value in values.split(",")))
        return Grid(**{**vars(self), **found})

    def candidates(self, fixed: Mapping[str, Any]) -> tuple[list[Candidate], list[str]]:
        """All that can be exported, and why others cannot.

        Args:
            fixed: options of a NeuronConfig that all have, sequence_length and target among them.

        Raises:
            ValueError: none can.
        """
        found, refused = dict[Candidate, None](), list[str]()
        for options in self._options(fixed["sequence_length"]):
            try:
                found[Candidate(NeuronConfig.from_dict({**fixed, **options}))] = None
            except ValueError as error:
                refused.append(str(error))
        if not found:
            raise ValueError(refused[0])
        return list(found), refused

    def _options(self, length: int) -> Iterator[dict[str, Any]]:
        for batch, chunk, ctx, buckets, policy in product(self.batch, self.chunk, self.ctx, self.buckets, self.policy):
            yield {
                "batch_size": batch,
                "prefill_chunk_size": chunk,
                "ctx_batch_size": ctx,
                "context_buckets": _contexts(buckets, length),
                "mixed_step": policy == "mixed",
            }


def _value(axis: str, value: str, word: str) -> int | str:
    known = {"buckets": BUCKETS, "policy": POLICIES}.get(axis, ())
    numbers = value.split("+") if axis == "buckets" else [value]
    if value in known:
        return value
    if axis == "policy" or not all(number.isdecimal() and int(number) for number in numbers):
        what = f"one of {', '.join(known)}" if known else "whole numbers of at least 1"
        more = " or lengths as 512+2048" if axis == "buckets" else ""
        raise ValueError(f"--search {word!r} has {value!r}; give {what}{more}")
    return value if axis == "buckets" else int(value)


def _contexts(buckets: str, length: int) -> tuple[int, ...]:
    if buckets not in BUCKETS:
        return tuple(sorted({*(int(number) for number in buckets.split("+")), length}))
    found, part = [length], {"none": length + 1, "quarters": 4, "halves": 2}[buckets]
    while found[0] // part >= _SMALLEST_CONTEXT:
        found.insert(0, found[0] // part)
    return tuple(found)


def export_command(model: str, config: NeuronConfig, output: str, others: Sequence[str] = ()) -> str:
    """The command line that exports a config, with every size that was compared.

    Args:
        others: words that name the model more closely, such as a revision.
    """
    words = ["optimum-cli", "export", "neuron", "--model", model, *others, "--target", config.target]
    for name in ("tensor_parallel_size", "batch_size", "sequence_length", "prefill_chunk_size", "ctx_batch_size"):
        words += [f"--{name.replace('_', '-')}", str(getattr(config, name))]
    words += ["--context-buckets", ",".join(map(str, config.context_buckets))]
    if not config.mixed_step:
        words.append("--no-mixed-step")
    if config.dtype != "auto":
        words += ["--dtype", config.dtype]
    return shlex.join([*words, output])


def serve_command(output: str, longest_queue: int) -> str:
    """The command line that serves it by the scheduler that was simulated; nobody of the trace is told to come again."""
    words = ["optimum-cli", "neuron", "serve", output, "--backend", "engine"]
    if longest_queue > DEFAULT_QUEUE:
        words += ["--max-queue", str(longest_queue)]
    return shlex.join(words)
