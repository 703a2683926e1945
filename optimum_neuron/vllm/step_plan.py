# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's process has the worker do beside what a step computes. It goes along with the step as vLLM's connectors' plans do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from ..runtime.step_rows import Prefix


@dataclass
class StepPlan(KVConnectorMetadata):
    """What a step does beside what it computes.

    Attributes:
        slots: by request id: the slot of each request that starts, where the cache has slots and prompts reuse them.
        reuse: before it, by request id: the slot whose first rows a request takes over, and how many.
        restore: before it, by request id: the snapshot of the state behind the tokens that a request's blocks contain already.
        keep: behind it, by request id: the place of a snapshot of what its row keeps of all its tokens.
    """

    slots: dict[str, int] = field(default_factory=dict)
    reuse: dict[str, Prefix] = field(default_factory=dict)
    restore: dict[str, int] = field(default_factory=dict)
    keep: dict[str, int] = field(default_factory=dict)


class Advance(NamedTuple):
    """The tokens of a request that a step computes, from place `start` up to `end`."""

    request_id: str
    start: int
    end: int


def advances(scheduler_output: Any) -> Iterator[Advance]:
    """What each request of a step of vLLM's scheduler computes."""
    cached = scheduler_output.scheduled_cached_reqs
    starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    starts |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
    for request_id, start in starts.items():
        yield Advance(request_id, start, start + scheduler_output.num_scheduled_tokens[request_id])
