# SPDX-License-Identifier: Apache-2.0
"""The kind of the next step, and how large its chunks may be. Knows nothing of requests, rows or devices."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, get_args

from ..step.spec import GraphKind, GraphSpec


Policy = Literal["auto", "mixed", "alternate", "prefill_first", "all_chunks"]
# Policies under which the size of a chunk decides how long decoding pauses.
_BOUNDED_PAUSE: tuple[Policy, ...] = ("auto", "mixed", "alternate")
_LEAST = {"max_step_tokens": 1, "long_prefill_token_threshold": 0, "max_bypass": 0, "chunk_alignment": 1}
# Enough times for a median that one hiccup does not move, few enough to follow longer contexts.
_TIMES_KEPT = 7
# A size that was slow for a while would otherwise never be tried again.
_COMMITS_UNTIL_FORGOTTEN = 128


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """Options of the scheduler: how it fills steps.

    Attributes:
        policy: "mixed" decodes and takes in prompts in the same step; "alternate" does so in turn; "prefill_first"
            takes in all prompts it can before it decodes; "all_chunks" takes in one whole prompt between two decode
            steps, in order. "auto" is "mixed" where the artifact has mixed graphs, else "alternate".
        max_step_tokens: most tokens of a step, decodes and prompt tokens together. None: what the graph holds.
        long_prefill_token_threshold: most prompt tokens that one request advances per step; 0 is no limit.
        itl_target_ms: longest pause between two tokens of a request, in milliseconds, that chunks may cause. Chunk
            sizes follow from measured step times. None: always the largest chunks.
        max_bypass: steps in a row in which prompts of the same priority that end in one step may go before a longer
            one. "all_chunks" never lets them.
        chunk_alignment: a piece that is not a prompt's last ends at a multiple of this, unless nothing would be left.
        prefix_reuse: whether a prompt reuses what the cache holds of an earlier request that starts alike; where a model's rows
            keep state too, as far as that was kept.
        reuse_generated: whether prompts reuse generated tokens too, not only prompts.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is out of range, or two values contradict each other.
    """

    policy: Policy = "auto"
    max_step_tokens: int | None = None
    long_prefill_token_threshold: int = 0
    itl_target_ms: float | None = None
    max_bypass: int = 4
    chunk_alignment: int = 1
    prefix_reuse: bool = True
    reuse_generated: bool = True

    def __post_init__(self) -> None:
        if self.policy not in get_args(Policy):
            raise ValueError(f"policy={self.policy!r} is not known; choose one of {', '.join(get_args(Policy))}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if name == "max_step_tokens" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be a whole number, not {value!r}")
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}; raise it or leave it out")
        for name in ("prefix_reuse", "reuse_generated"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be true or false, not {getattr(self, name)!r}")
        target = self.itl_target_ms
        if target is not None and not target > 0:
            raise ValueError(f"itl_target_ms={target} must be above 0; leave it out for no target")
        if target is not None and self.policy not in _BOUNDED_PAUSE:
            raise ValueError(
                f"itl_target_ms={target} cannot be kept with policy={self.policy!r}, which decodes after any number of "
                f"chunks; choose policy 'mixed' or 'alternate', or leave itl_target_ms out"
            )


def resolve_policy(policy: Policy, mixed_step: bool) -> Policy:
    """Return the policy that "auto" stands for, and any other as it is; ValueError where it needs graphs that the artifact lacks."""
    if policy == "auto":
        return "mixed" if mixed_step else "alternate"
    if policy == "mixed" and not mixed_step:
        raise ValueError(
            "policy='mixed' needs mixed graphs, which an export with mixed_step=False leaves out; choose policy "
            "'alternate' or export with mixed_step=True"
        )
    return policy


def next_kind(
    policy: Policy, *, decodes: bool, prompts: bool, after_chunks: bool, unfinished: bool
) -> GraphKind | None:
    """Return the kind of the next step by a resolved policy, or None where nothing can be advanced.

    Args:
        prompts: whether a prompt can be advanced.
        after_chunks: whether the last step took in prompts.
        unfinished: whether a prompt is only partly taken in.
    """
    if not prompts:
        return "token_generation" if decodes else None
    if not decodes:
        return "chunked_prefill"
    if policy == "mixed":
        return "mixed"
    if policy == "prefill_first" or (policy == "all_chunks" and unfinished):
        return "chunked_prefill"
    return "token_generation" if after_chunks else "chunked_prefill"


class StepCosts:
    """Measured times of steps, in seconds, by the kind and chunk size of the graph: contexts grow slowly, and old times go."""

    def __init__(self) -> None:
        self._times: dict[tuple[GraphKind, int], deque[float]] = {}
        self._last_commit: dict[tuple[GraphKind, int], int] = {}
        self._commits = 0

    def record_time(self, graph: GraphSpec, seconds: float | None) -> None:
        """Note the time of a step; None where it was not measured."""
        self._commits += 1
        if seconds is not None:
            key = graph.kind, graph.chunk_size
            self._times.setdefault(key, deque(maxlen=_TIMES_KEPT)).append(seconds)
            self._last_commit[key] = self._commits
        for key, last in list(self._last_commit.items()):
            # Those of decode steps, to which all others are compared, never go.
            if key[1] and self._commits - last > _COMMITS_UNTIL_FORGOTTEN:
                del self._times[key], self._last_commit[key]

    def largest_within(self, target: float, chunk_sizes: Sequence[int], kind: GraphKind) -> int:
        """Return the largest chunk size with which decoding pauses for at most `target` seconds.

        It is the smallest where none does, or where no step of the kind was measured. The time of a size that was not measured
        lies on the line from the decode step's time through the nearest one that was. A decode step follows each step of chunks alone.
        """
        known = {size: median(times) for (other, size), times in self._times.items() if other == kind}
        # An unknown time of 0 makes larger sizes look slower than they are: the safe side.
        decode = median(self._times.get(("token_generation", 0), (0.0,)))

        def pause(size: int) -> float:
            step = known.get(size)
            if step is None:
                nearest = min(known, key=lambda other: abs(other - size))
                base = min(decode, known[nearest])
                step = base + (known[nearest] - base) * size / nearest
            return step if kind == "mixed" else step + decode

        fitting = [size for size in chunk_sizes if known and pause(size) <= target]
        return fitting[-1] if fitting else chunk_sizes[0]
