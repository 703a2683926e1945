# SPDX-License-Identifier: Apache-2.0
"""Prefix reuse over vLLM's blocks by a model with state next to them: snapshots of that state, at borders of blocks.

vLLM finds whole blocks of a prefix and knows nothing of snapshots, so what it finds is cut to where one is: a hit has both, its
blocks by reference and its state by a copy. Where either is gone there is a shorter hit, or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from vllm.v1.request import Request, RequestStatus

from ..config import NeuronConfig
from ..core import Prefix
from ..engine.block_pool import MIN_REUSE
from ..engine.snapshots import SnapshotTable
from .step_plan import StepPlan, list_advances


class _StartedPrompt(NamedTuple):
    """The tokens that a request takes in before it generates, by their number, and its prefix."""

    length: int
    prefix: Prefix


class BlockSnapshots:
    """The scheduler's side. Snapshots hold whole blocks, and are kept where a piece of a prompt ends

    - at the last border of a block within a prompt, and where the prompt ends at one;
    - where a prompt parts from blocks that are cached, if no snapshot of them exists: the next one that starts alike uses it;
    - at every multiple of `state_snapshot_interval`, rounded up to whole blocks.

    Prompts are cut there. After a preemption a request's prompt is all that it had.
    """

    def __init__(self, config: NeuronConfig) -> None:
        self._size = config.block_length
        interval = config.state_snapshot_interval
        self._interval = None if interval is None else -(-interval // self._size) * self._size
        self._table = SnapshotTable(config.state_places, MIN_REUSE, self._size, self._interval)
        self._prompts: dict[str, _StartedPrompt] = {}

    def find_start(self, request: Request, cached: int) -> int:
        """Return how many tokens a request that starts need not compute.

        Args:
            cached: its first tokens that are in vLLM's blocks.
        """
        prefix = Prefix()
        if cached:
            tokens = np.asarray(request.all_token_ids[: cached + 1], np.int32)
            prefix = self._table.resume_prompt(
                tokens, cached, has=cached + 1
            )  # after whole blocks there may be anything
        self._prompts[request.request_id] = _StartedPrompt(request.num_tokens, prefix)
        return prefix.length

    def find_cut(self, request: Request, start: int) -> int:
        """Return the first place after `start` tokens of a request where a piece is to end, before the prompt does; 0: nowhere."""
        if request.status != RequestStatus.RUNNING and request.num_computed_tokens:
            self.find_start(request, 0)  # the next turn of a session: vLLM does not look for its blocks
        length, prefix = self._prompts[request.request_id]
        if start + 1 >= length:
            return 0  # a request that decodes has none
        places = [prefix.cut, (length - 1) // self._size * self._size]
        if self._interval is not None:
            places.append((start // self._interval + 1) * self._interval)
        return min((place for place in places if start < place < length), default=0)

    def forget_all(self) -> None:
        """Forget all snapshots, as vLLM forgets all blocks."""
        self._table.forget_all()

    def plan_step(self, scheduler_output: Any, requests: Mapping[str, Request]) -> StepPlan:
        """Return what a step restores and keeps. Call it once for each step, in their order: the next one finds what this one keeps.

        Args:
            requests: vLLM's, by id.
        """
        for ended in scheduler_output.finished_req_ids - scheduler_output.num_scheduled_tokens.keys():
            self._prompts.pop(ended, None)
        plan = StepPlan()
        starting = {new.req_id for new in scheduler_output.scheduled_new_reqs}
        starting |= scheduler_output.scheduled_cached_reqs.resumed_req_ids
        kept: dict[str, np.ndarray] = {}
        used: list[int] = []
        for request_id, start, end in list_advances(scheduler_output):
            length, prefix = self._prompts[request_id]
            if request_id in starting and prefix.snapshot is not None:
                plan.prefixes[request_id] = prefix
                used.append(prefix.snapshot)
            at_border = end % self._size == 0 and end <= length
            if at_border and self._table.is_worth(start, end, length - end, prefix.cut):
                kept[request_id] = np.asarray(requests[request_id].all_token_ids[:end], np.int32)
        plan.keep = self._table.keep_texts(kept, used)
        return plan
