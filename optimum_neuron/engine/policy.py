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
            keep state too, as far as there is a snapshot of it.
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
        if self.max_step_tokens is not None:
            _check_number("max_step_tokens", self.max_step_tokens, 1)
        _check_number("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        _check_number("max_bypass", self.max_bypass, 0)
        _check_number("chunk_alignment", self.chunk_alignment, 1)
        for name in ("prefix_reuse", "reuse_generated"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if self.itl_target_ms is not None:
            self._check_target(self.itl_target_ms)

    def _check_target(self, target_ms: float) -> None:
        if not target_ms > 0:
            raise ValueError(f"itl_target_ms={target_ms} must be above 0; leave it out for no target")
        if self.policy not in _BOUNDED_PAUSE:
            raise ValueError(
                f"itl_target_ms={target_ms} cannot be kept with policy={self.policy!r}, which decodes after any number of "
                f"chunks; choose policy 'mixed' or 'alternate', or leave itl_target_ms out"
            )


def _check_number(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}; raise it or leave it out")


def resolve_policy(policy: Policy, mixed_step: bool) -> Policy:
    """Return the policy that "auto" stands for, and any other as it is.

    Raises:
        ValueError: the policy needs graphs that the artifact lacks.
    """
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
    """Return the kind of the next step, or None where nothing can be advanced.

    Args:
        policy: a resolved one, not "auto".
        decodes: whether a request generates.
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
        key = graph.kind, graph.chunk_size
        if seconds is not None and (key not in self._times or self._is_old(key)):
            self._times[key] = deque(maxlen=_TIMES_KEPT)
        self._commits += 1
        if seconds is not None:
            self._times[key].append(seconds)
            self._last_commit[key] = self._commits

    def _is_old(self, key: tuple[GraphKind, int]) -> bool:
        """Return whether times are forgotten; those of decode steps, to which all others are compared, never are."""
        return bool(key[1]) and self._commits - self._last_commit[key] > _COMMITS_UNTIL_FORGOTTEN

    def largest_within(self, target: float, chunk_sizes: Sequence[int], kind: GraphKind) -> int:
        """Return the largest chunk size with which decoding pauses for at most `target` seconds.

        It is the smallest where none does, or where no step of the kind was measured.

        Args:
            chunk_sizes: ascending.
            kind: "mixed", or "chunked_prefill" where a decode step follows each chunk step.
        """
        pauses = {size: self._estimate_pause(kind, size) for size in chunk_sizes}
        fitting = [size for size, pause in pauses.items() if pause is not None and pause <= target]
        return fitting[-1] if fitting else chunk_sizes[0]

    def _estimate_pause(self, kind: GraphKind, chunk_size: int) -> float | None:
        step = self.estimate_time(kind, chunk_size)
        if step is None or kind == "mixed":
            return step
        return step + self._decode_time()

    def estimate_time(self, kind: GraphKind, chunk_size: int) -> float | None:
        """Return the time of a step; None where no size of the kind was measured.

        Where this size was not, it lies on the line from the decode step's time through the nearest measured size.
        """
        known = {
            size: median(times)
            for (other, size), times in self._times.items()
            if other == kind and not self._is_old((other, size))
        }
        if chunk_size in known or not known:
            return known.get(chunk_size)
        nearest = min(known, key=lambda size: abs(size - chunk_size))
        base = min(self._decode_time(), known[nearest])
        return base + (known[nearest] - base) * chunk_size / nearest

    def _decode_time(self) -> float:
        """Return 0 where unknown, which makes larger sizes look slower than they are: the safe side."""
        times = self._times.get(("token_generation", 0))
        return median(times) if times else 0.0
