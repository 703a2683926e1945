# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with steps that take in prompts as the chunk rows of one graph run hold them, over slots or blocks.

vLLM takes decodes and prompts out of one number of tokens, and running prompts come before waiting ones: decodes would leave
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
    """vLLM's own scheduler, for slots and for state that rows keep next to blocks.

    It counts what prompts reuse of slots with the hits of its own prefix cache. Where rows keep state, a hit in blocks ends
    where a snapshot is, and pieces of prompts end where one is due.
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
            output.kv_connector_metadata = self._snapshots.plan_step(output, self.requests)
        return output

    def find_prompt_start(self, request: Request, cached: int) -> int:
        return cached if self._snapshots is None else self._snapshots.find_start(request, cached)

    def limit_tokens(self, request: Request, start: int, tokens: int) -> int:
        cut = 0 if self._snapshots is None else self._snapshots.find_cut(request, start)
        return min(tokens, cut - start) if cut else tokens

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget snapshots with the blocks that they belong to."""
        done: bool = super().reset_prefix_cache(reset_running_requests, reset_connector)
        if done and self._snapshots is not None:
            self._snapshots.forget_all()
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
    """vLLM's scheduler with a token for every request that decodes, and for prompts what the planner gives them.

    vLLM decides all else: which requests decode, wait, get blocks and give them back. A request that is not planned does not start.
    """

    waiting: OfferedQueue
    kv_holding_waiting: OfferedQueue
    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        over_slots = isinstance(self.connector, SlotConnector)
        self._room: CacheRoom = self.connector if over_slots else BlockRoom(self, self._sizes, self._snapshots)
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
        # The client of a request that ended often sends its next one at once: it need not wait for a piece of a long prompt.
        decodes_first = bool(decodes and self.finished_req_ids)
        planned = self._plan_prompts(min(self._most - decodes, self._chunk_tokens), decodes_first)
        output = self._schedule_planned(decodes, planned, throttle_prefills)
        self._was_refused = not planned.keys() <= output.num_scheduled_tokens.keys()
        return output

    def _schedule_planned(self, decodes: int, planned: dict[str, int], throttle_prefills: bool) -> SchedulerOutput:
        """Let vLLM make a step of so many decodes and of these tokens of prompts."""
        self._planned = planned
        waiting = [self.requests[name] for name in planned if self.requests[name].status != RequestStatus.RUNNING]
        self.kv_holding_waiting.offer_requests(request for request in waiting if request.num_computed_tokens)
        self.waiting.offer_requests(request for request in waiting if not request.num_computed_tokens)
        self.max_num_scheduled_tokens = decodes + sum(planned.values())
        return super().schedule(throttle_prefills)

    def _plan_prompts(self, tokens: int, decodes_first: bool) -> dict[str, int]:
        if tokens < 1:
            return {}
        places = self._count_places()
        prompts = [request for request in self.running if request.is_prefill_chunk]
        cached: Mapping[str, int] = {}
        # What vLLM did not start, for a reason of its own, keeps no started prompt from advancing.
        if places and not (self._was_refused and prompts):
            ready, cached = self._list_ready()
            prompts += ready
        if not prompts:
            return {}
        slots, most = self._room.draft_starts(places), self._limit_per_prompt()
        cuts = {} if self._snapshots is None else self._find_cuts(self._snapshots, prompts, cached)
        planned = self._planner.plan_tokens(
            prompts, cached, slots, tokens, most, cuts=cuts, decodes_first=decodes_first
        )
        return {name: planned[name] for request in prompts if (name := request.request_id) in planned}

    @staticmethod
    def _find_cuts(snapshots: BlockSnapshots, prompts: Sequence[Request], cached: Mapping[str, int]) -> dict[str, int]:
        """Return where the next piece of each prompt is to end."""
        starts = {request: request.num_computed_tokens or cached.get(request.request_id, 0) for request in prompts}
        return {request.request_id: snapshots.find_cut(request, start) for request, start in starts.items()}

    def _count_places(self) -> int:
        """Return how many requests may start or continue next to those that run."""
        running = len(self.running) + self.num_waiting_for_streaming_input
        return max(0, min(self.max_num_running_reqs, self.max_num_active_reqs) - running)

    def _list_ready(self) -> tuple[list[Request], Mapping[str, int]]:
        """Return the first waiting requests in vLLM's order, sessions with a part of the cache before all others, and how many
        tokens of them vLLM has cached."""
        sessions = [request for request in self.kv_holding_waiting if self.may_start(request)]
        if sessions or self.pause_state != PauseState.UNPAUSED:
            return sessions, {}
        ready = [request for request in islice(self.waiting, WAITING_WINDOW) if self.may_start(request)]
        cached = self._room.find_admissible(ready)
        return ready[: len(cached)], cached

    def _limit_per_prompt(self) -> int:
        """Return the tokens that vLLM cuts prompts to, as it counts."""
        threshold: int = self.scheduler_config.long_prefill_token_threshold
        count = sum(self.get_request_counts())
        if not threshold or count == 1:
            return self.max_model_len
        if self.adaptive_long_prefill_threshold:
            threshold = max(threshold, self.scheduler_config.max_num_batched_tokens // count)
        return threshold

    def limit_tokens(self, request: Request, start: int, tokens: int) -> int:
        """Give a prompt what was planned."""
        tokens = super().limit_tokens(request, start, tokens)
        if request.status == RequestStatus.RUNNING and not request.is_prefill_chunk:
            return tokens
        return min(tokens, self._planned.get(request.request_id, 0))


class AsyncStepScheduler(StepScheduler, AsyncScheduler):
    """The same for async scheduling, which makes a step while the one before it runs.

    It makes none while a prompt is under way: those steps take long, and a request that arrives during one would wait for the next.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_flight = 0

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self._in_flight and any(request.is_prefill_chunk for request in self.running):
            return self._schedule_planned(0, {}, throttle_prefills)
        output = super().schedule(throttle_prefills)
        self._in_flight += output.total_num_scheduled_tokens > 0
        return output

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        self._in_flight -= scheduler_output.total_num_scheduled_tokens > 0
        return super().update_from_output(scheduler_output, model_runner_output)
