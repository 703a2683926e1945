# SPDX-License-Identifier: Apache-2.0
"""The part of a step that the scheduler's process adds for the worker. It comes with the step, as the plans of vLLM's connectors do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from ..core import Prefix


@dataclass
class StepPlan(KVConnectorMetadata):
    """Copies and snapshots of a step, by request id.

    Attributes:
        slots: the slot of each request that starts, where the cache has slots and prompts reuse them.
        prefixes: what a request that starts need not compute, where its row or a snapshot has to be made ready for it.
        keep: the place of a snapshot of what a request's row keeps of all its tokens after the step.
    """

    slots: dict[str, int] = field(default_factory=dict)
    prefixes: dict[str, Prefix] = field(default_factory=dict)
    keep: dict[str, int] = field(default_factory=dict)


def list_advances(scheduler_output: Any) -> Iterator[tuple[str, int, int]]:
    """Yield each request of a step of vLLM's scheduler with the places where its tokens start and end."""
    cached = scheduler_output.scheduled_cached_reqs
    starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    starts |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
    for request_id, start in starts.items():
        yield request_id, start, start + scheduler_output.num_scheduled_tokens[request_id]
