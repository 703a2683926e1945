# SPDX-License-Identifier: Apache-2.0
"""Prefix reuse over vLLM's blocks by a model whose rows keep state beside them: snapshots of that state, at borders of blocks.

vLLM finds whole blocks of a prefix and knows nothing of snapshots, so what it finds is cut to where one is: a hit has both, its
blocks by reference and its state by a copy. Where either is gone there is a shorter hit, or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from vllm.v1.request import Request, RequestStatus

from ..config import NeuronConfig
from ..engine.slots import MIN_REUSE
from ..engine.snapshots import Resumption, SnapshotTable
from .step_plan import StepPlan, advances


class _Text(NamedTuple):
    """What a request takes in before it generates: so many tokens, and where it goes on in them."""

    length: int
    found: Resumption


class BlockSnapshots:
    """The scheduler's side. Snapshots are of whole blocks, and kept where a chunk ends

    - at the last border of a block within a prompt, and where the prompt ends at one;
    - where a prompt parts from blocks that are cached, if no snapshot is of them: who starts alike once more goes on there;
    - at every multiple of `state_snapshot_interval`, rounded up to whole blocks.

    Chunks are cut there. After a preemption a request's prompt is all that it had.
    """

    def __init__(self, config: NeuronConfig) -> None:
        self._size = config.block_length
        interval = config.state_snapshot_interval
        self._interval = None if interval is None else -(-interval // self._size) * self._size
        self._table = SnapshotTable(config.snapshot_places, MIN_REUSE, self._size, self._interval)
        self._texts: dict[str, _Text] = {}

    def start(self, request: Request, cached: int) -> int:
        """How many tokens a request that starts need not compute.

        Args:
            cached: its first tokens that are in vLLM's blocks.
        """
        found = Resumption(0)
        if cached:
            tokens = np.asarray(request.all_token_ids[: cached + 1], np.int32)
            found = self._table.resume(tokens, cached, has=cached + 1)  # behind whole blocks there may be anything
        self._texts[request.request_id] = _Text(request.num_tokens, found)
        return found.length

    def next_cut(self, request: Request, start: int) -> int:
        """The first place behind `start` tokens of a request where a chunk is to end, before the prompt does; 0: nowhere."""
        if request.status != RequestStatus.RUNNING and request.num_computed_tokens:
            self.start(request, 0)  # the next turn of a session, for whose blocks vLLM does not look
        length, found = self._texts[request.request_id]
        if start + 1 >= length:
            return 0  # who decodes has none
        places = [found.parts_at, (length - 1) // self._size * self._size]
        if self._interval is not None:
            places.append((start // self._interval + 1) * self._interval)
        return min((place for place in places if start < place < length), default=0)

    def clear(self) -> None:
        """Forget all snapshots, as vLLM forgets all blocks."""
        self._table.clear()

    def plan(self, scheduler_output: Any, requests: Mapping[str, Request]) -> StepPlan:
        """What a step restores and keeps; to be called once for each step, in their order: the next one finds what this one keeps.

        Args:
            requests: vLLM's, by id.
        """
        for ended in scheduler_output.finished_req_ids - scheduler_output.num_scheduled_tokens.keys():
            self._texts.pop(ended, None)
        plan = StepPlan()
        starting = {new.req_id for new in scheduler_output.scheduled_new_reqs}
        starting |= scheduler_output.scheduled_cached_reqs.resumed_req_ids
        kept: dict[str, np.ndarray] = {}
        for request_id, start, end in advances(scheduler_output):
            length, found = self._texts[request_id]
            if request_id in starting and found.snapshot is not None:
                plan.restore[request_id] = found.snapshot
            at_border = end % self._size == 0 and end <= length
            if at_border and self._table.is_worth(start, end, length - end, found.parts_at):
                kept[request_id] = np.asarray(requests[request_id].all_token_ids[:end], np.int32)
        plan.keep = self._table.keep(kept, list(plan.restore.values()))
        return plan
