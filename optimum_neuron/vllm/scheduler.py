# SPDX-License-Identifier: Apache-2.0
"""vLLM's schedulers, told before each step how many tokens it holds, and which long prompt sits it out.

vLLM takes decodes and prompts out of one number. If it is what chunk rows hold, every decode leaves a place of them empty;
if it is more, prompts that have a step for themselves take too much for one run of a graph. And who has begun comes before
who waits: without chunk rows of their own, short prompts would wait for all of a long one.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from .settings import chunk_tokens, find_served
from .slot_connector import SlotConnector


class StepScheduler(Scheduler):
    """Steps have a token for every request that decodes, and what the chunk rows hold for prompts.

    A prompt that fits one step passes one that fills several, in every other step at most: a long prompt is never stopped.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        served = find_served(self.vllm_config)
        assert served is not None, "the platform exports a checkpoint before an engine starts"
        self._chunk_tokens = chunk_tokens(served.artifact.config)
        self._most: int = self.max_num_scheduled_tokens
        self._last_rest = -1

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        decodes = sum(not request.is_prefill_chunk for request in self.running)
        self.max_num_scheduled_tokens = min(self._most, self._chunk_tokens + decodes)
        resting = self._resting()
        if resting is not None:
            self._last_rest = self.current_step + 1  # the step that begins now
            resting.next_decode_eligible_step = self.current_step + 2
        if isinstance(self.connector, SlotConnector):
            self.connector.resting = None if resting is None else resting.request_id
        return super().schedule(throttle_prefills)

    def _resting(self) -> Request | None:
        """The long prompt that leaves this step to the prompt that is next in line; None where there is no need."""
        if self.current_step == self._last_rest or not self.waiting:
            return None
        if len(self.running) >= min(self.max_num_running_reqs, self.max_num_active_reqs):
            return None
        following = self.waiting.peek_request()
        ready = following.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        if not ready or following.num_tokens > self._chunk_tokens:
            return None
        for request in self.running:
            if request.is_prefill_chunk and request.num_tokens - request.num_computed_tokens > self._chunk_tokens:
                by_priority = self.policy == SchedulingPolicy.PRIORITY
                return None if by_priority and following.priority > request.priority else request
        return None


class AsyncStepScheduler(StepScheduler, AsyncScheduler):
    """The same for async scheduling."""
