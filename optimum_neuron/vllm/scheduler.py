# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with steps that take in prompts as the chunk rows of one run of a graph hold them; and over slots that are copied.

vLLM takes decodes and prompts out of one number of tokens, and who has begun comes before who waits: decodes would leave
places of chunk rows empty, or prompts take more than one run holds, and short prompts would wait for all of a long one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from ..engine.scheduler import WAITING_WINDOW
from .block_room import BlockRoom, CacheRoom
from .block_snapshots import BlockSnapshots
from .prompt_planner import PromptPlanner
from .scheduler_hooks import HookedScheduler, OfferedQueue
from .settings import find_served
from .slot_connector import SlotConnector


class SlotScheduler(HookedScheduler):
    """vLLM's own, for slots and for what rows keep beside blocks.

    It counts what prompts reuse of slots where it counts the hits of its own prefix cache. Where rows keep state, a hit in blocks ends
    where a snapshot is, and chunks end where one is due.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        served = find_served(self.vllm_config)
        assert served is not None, "the platform exports a checkpoint before an engine starts"
        self._sizes = served.artifact.config
        self._snapshots: BlockSnapshots | None = None
        if self.cache_config.enable_prefix_caching and not served.artifact.model.reuses_prefixes:
            self._snapshots = BlockSnapshots(self._sizes)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = super().schedule(throttle_prefills)
        if self._snapshots is not None:
            output.kv_connector_metadata = self._snapshots.plan(output, self.requests)
        return output

    def prompt_start(self, request: Request, cached: int) -> int:
        return cached if self._snapshots is None else self._snapshots.start(request, cached)

    def most_tokens(self, request: Request, start: int, tokens: int) -> int:
        cut = 0 if self._snapshots is None else self._snapshots.next_cut(request, start)
        return min(tokens, cut - start) if cut else tokens

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget snapshots with the blocks that they belong to."""
        done: bool = super().reset_prefix_cache(reset_running_requests, reset_connector)
        if done and self._snapshots is not None:
            self._snapshots.clear()
        return done

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        stats: SchedulerStats | None = super().make_stats(*args, **kwargs)
        if stats is not None and stats.connector_prefix_cache_stats is not None:
            stats.prefix_cache_stats = stats.connector_prefix_cache_stats
            stats.connector_prefix_cache_stats = None
        return stats


class AsyncSlotScheduler(SlotScheduler, AsyncScheduler):
    """The same for async scheduling."""


class StepScheduler(SlotScheduler):
    """Steps have a token for every request that decodes, and for prompts what the planner gives them.

    All else is vLLM's: who decodes, who waits and in which order, who gets blocks, who gives them back. Who is not planned does not start.
    """

    waiting: OfferedQueue
    kv_holding_waiting: OfferedQueue
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        over_slots = isinstance(self.connector, SlotConnector)
        self._room: CacheRoom = self.connector if over_slots else BlockRoom(self, self._snapshots)
        by_priority = self.policy == SchedulingPolicy.PRIORITY
        self._planner = PromptPlanner(self._sizes, by_priority=by_priority, reuse=self._room.reuses)
        self._chunk_tokens = self._sizes.prompt_capacity
        self._most = self.max_num_scheduled_tokens
        self._planned: dict[str, int] = {}
        self._was_refused = False
        self.waiting = OfferedQueue(self.waiting)
        self.kv_holding_waiting = OfferedQueue(self.kv_holding_waiting)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        decodes = sum(not request.is_prefill_chunk for request in self.running)
        # The client of a request that ended often sends its next one at once: it need not wait for a long prompt's chunk.
        decodes_first = bool(decodes and self.finished_req_ids)
        planned = self._plan(min(self._most - decodes, self._chunk_tokens), decodes_first)
        output = self._schedule(decodes, planned, throttle_prefills)
        self._was_refused = not planned.keys() <= output.num_scheduled_tokens.keys()
        return output

    def _schedule(self, decodes: int, planned: dict[str, int], throttle_prefills: bool) -> SchedulerOutput:
        """A step of vLLM's own making, of so many decodes and of these tokens of prompts."""
        self._planned = planned
        waiting = [self.requests[name] for name in planned if self.requests[name].status != RequestStatus.RUNNING]
        self.kv_holding_waiting.offer(request for request in waiting if request.num_computed_tokens)
        self.waiting.offer(request for request in waiting if not request.num_computed_tokens)
        self.max_num_scheduled_tokens = decodes + sum(planned.values())
        return super().schedule(throttle_prefills)

    def _plan(self, tokens: int, decodes_first: bool) -> dict[str, int]:
        if tokens < 1:
            return {}
        places = self._places()
        prompts = [request for request in self.running if request.is_prefill_chunk]
        cached: Mapping[str, int] = {}
        # What vLLM did not start, for a reason of its own, keeps nobody who has begun from going on.
        if places and not (self._was_refused and prompts):
            ready, cached = self._ready()
            prompts += ready
        if not prompts:
            return {}
        slots, most = self._room.draft(places), self._tokens_per_prompt()
        cuts = {} if self._snapshots is None else self._cuts(self._snapshots, prompts, cached)
        planned = self._planner.plan(prompts, cached, slots, tokens, most, cuts=cuts, decodes_first=decodes_first)
        return {name: planned[name] for request in prompts if (name := request.request_id) in planned}

    @staticmethod
    def _cuts(snapshots: BlockSnapshots, prompts: Sequence[Request], cached: Mapping[str, int]) -> dict[str, int]:
        """Where the next chunk of each prompt is to end."""
        starts = {request: request.num_computed_tokens or cached.get(request.request_id, 0) for request in prompts}
        return {request.request_id: snapshots.next_cut(request, start) for request, start in starts.items()}

    def _places(self) -> int:
        """Requests that may start or go on beside those that run."""
        running = len(self.running) + self.num_waiting_for_streaming_input
        return max(0, min(self.max_num_running_reqs, self.max_num_active_reqs) - running)

    def _ready(self) -> tuple[list[Request], Mapping[str, int]]:
        """The first of those that wait, in vLLM's order: sessions, which hold a part of the cache, before all others; and how many
        tokens of them vLLM has cached."""
        sessions = [request for request in self.kv_holding_waiting if self.may_start(request)]
        if sessions or self.pause_state != PauseState.UNPAUSED:
            return sessions, {}
        ready = [request for request in islice(self.waiting, WAITING_WINDOW) if self.may_start(request)]
        cached = self._room.admissible(ready)
        return ready[: len(cached)], cached

    def _tokens_per_prompt(self) -> int:
        """What vLLM cuts prompts to, as it counts."""
        threshold: int = self.scheduler_config.long_prefill_token_threshold
        count = sum(self.get_request_counts())
        if not threshold or count == 1:
            return self.max_model_len
        if self.adaptive_long_prefill_threshold:
            threshold = max(threshold, self.scheduler_config.max_num_batched_tokens // count)
        return threshold

    def most_tokens(self, request: Request, start: int, tokens: int) -> int:
        """A prompt gets what was planned."""
        tokens = super().most_tokens(request, start, tokens)
        if request.status == RequestStatus.RUNNING and not request.is_prefill_chunk:
            return tokens
        return min(tokens, self._planned.get(request.request_id, 0))


class AsyncStepScheduler(StepScheduler, AsyncScheduler):
    """The same for async scheduling, which makes a step while the one before it runs.

    Not while a prompt is under way: its steps take long, and who came during one would wait for the next one, too.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_flight = 0

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self._in_flight and any(request.is_prefill_chunk for request in self.running):
            return self._schedule(0, {}, throttle_prefills)
        output = super().schedule(throttle_prefills)
        self._in_flight += output.total_num_scheduled_tokens > 0
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        self._in_flight -= scheduler_output.total_num_scheduled_tokens > 0
        return super().update_from_output(scheduler_output, model_runner_output)
