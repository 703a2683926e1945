# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with steps that take in prompts as the chunk rows of one graph run hold them, over slots or blocks.

vLLM takes decodes and prompts out of one number of tokens, and running prompts come before waiting ones: decodes would leave
places of chunk rows empty, or prompts take more than one run holds, and short prompts would wait for all of a long one.

Names of vLLM's scheduler that begin with an underscore are no interface of it: tests/vllm/test_surface.py compares each with the
supported versions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from ..engine.scheduler import WAITING_WINDOW
from .options import find_served
from .prefixes import BlockPrefixes, SlotConnector
from .prompt_planner import BlockRoom, PromptPlanner


class OfferedQueue(RequestQueue):
    """A queue of waiting requests that shows vLLM only those that may start in this step, in the order of the offer.

    vLLM starts the first request in its queues, and no setting names the next one. It counts and removes in the whole queue.
    """

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue
        self._offered: deque[Request] = deque()

    def offer_requests(self, requests: Iterable[Request]) -> None:
        """Show these requests, which wait in this queue, until the next offer."""
        self._offered = deque(requests)

    def add_request(self, request: Request) -> None:
        self._queue.add_request(request)

    def peek_request(self) -> Request:
        return self._offered[0]

    def pop_request(self) -> Request:
        request = self._offered.popleft()
        self._queue.remove_request(request)
        return request

    def prepend_request(self, request: Request) -> None:
        self._queue.prepend_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        self._queue.prepend_requests(requests)

    def remove_request(self, request: Request) -> None:
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[Request]) -> None:
        gone = set(requests)
        self._queue.remove_requests(gone)
        self._offered = deque(request for request in self._offered if request not in gone)

    def __bool__(self) -> bool:
        return bool(self._offered)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)


class SlotScheduler(Scheduler):
    """vLLM's own scheduler, for slots and for state that rows keep next to blocks.

    It counts what prompts reuse of slots with the hits of its own prefix cache. Where rows keep state, a hit in blocks ends
    where that was kept, and pieces of prompts end where it is due to be.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        served = find_served(self.vllm_config)
        assert served is not None, "the platform exports a checkpoint before an engine starts"
        self._sizes = served.artifact.config
        self._prefixes: BlockPrefixes | None = None
        if self.cache_config.enable_prefix_caching and not served.artifact.model.reuses_prefixes:
            self._prefixes = BlockPrefixes(self._sizes)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = super().schedule(throttle_prefills)
        if self._prefixes is not None:
            output.kv_connector_metadata = self._prefixes.plan_step(output, self.requests)
        return output

    def limit_tokens(self, request: Request, start: int, tokens: int) -> int:
        """Return how many of `tokens`, from place `start` on, a request gets in this step."""
        cut = 0 if self._prefixes is None else self._prefixes.find_cut(request, start)
        return min(tokens, cut - start) if cut else tokens

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget state with the blocks that it belongs to."""
        done: bool = super().reset_prefix_cache(reset_running_requests, reset_connector)
        if done and self._prefixes is not None:
            self._prefixes.forget_all()
        return done

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        stats: SchedulerStats | None = super().make_stats(*args, **kwargs)
        if stats is not None and stats.connector_prefix_cache_stats is not None:
            stats.prefix_cache_stats = stats.connector_prefix_cache_stats
            stats.connector_prefix_cache_stats = None
        return stats

    def _get_local_prefix_cache_hit(self, request: Request, *limits: Any) -> tuple[Any, int, Any, bool]:
        """Cut a hit to where state of its rows was kept. From vLLM 0.33 on, `limits` has the longest hit that is allowed."""
        blocks, cached, boundary, diverged = super()._get_local_prefix_cache_hit(request, *limits)
        tokens = cached if self._prefixes is None else self._prefixes.find_start(request, cached)
        if tokens != cached:
            blocks = self.kv_cache_manager.truncate_computed_blocks(blocks, tokens)
        return blocks, tokens, boundary, diverged

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Cut a request's tokens: the last hook before vLLM takes blocks for them, and the only one for each request."""
        tokens = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        return self.limit_tokens(request, num_computed_tokens, tokens)


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
        self._room: SlotConnector | BlockRoom
        if isinstance(self.connector, SlotConnector):
            self._room = self.connector
        else:
            self._room = BlockRoom(self, self._sizes, self._prefixes)
        by_priority = self.policy == SchedulingPolicy.PRIORITY
        self._planner = PromptPlanner(self._sizes, by_priority=by_priority, reuse=self._room.reuses)
        self._most = self.max_num_scheduled_tokens
        self._planned: dict[str, int] = {}
        self._was_refused = False
        self.waiting = OfferedQueue(self.waiting)
        self.kv_holding_waiting = OfferedQueue(self.kv_holding_waiting)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        decodes = sum(not request.is_prefill_chunk for request in self.running)
        # The client of a request that ended often sends its next one at once: it need not wait for a piece of a long prompt.
        decodes_first = bool(decodes and self.finished_req_ids)
        planned = self._plan_prompts(min(self._most - decodes, self._sizes.prompt_capacity), decodes_first)
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
        running = len(self.running) + self.num_waiting_for_streaming_input
        places = max(0, min(self.max_num_running_reqs, self.max_num_active_reqs) - running)
        prompts = [request for request in self.running if request.is_prefill_chunk]
        cached: Mapping[str, int] = {}
        # What vLLM did not start, for a reason of its own, keeps no started prompt from advancing.
        if places and not (self._was_refused and prompts):
            ready, cached = self._list_ready()
            prompts += ready
        if not prompts:
            return {}
        starts = {request: request.num_computed_tokens or cached.get(request.request_id, 0) for request in prompts}
        cuts: dict[str, int] = {}
        slots = self._room.draft_starts(places)
        if self._prefixes is not None:
            cuts = {request.request_id: self._prefixes.find_cut(request, start) for request, start in starts.items()}
        planned = self._planner.plan_tokens(
            prompts, cached, slots, tokens, self._limit_per_prompt(), cuts=cuts, decodes_first=decodes_first
        )
        return {name: planned[name] for request in prompts if (name := request.request_id) in planned}

    def _list_ready(self) -> tuple[list[Request], Mapping[str, int]]:
        """Return the first waiting requests, sessions with a part of the cache before all others, and how much vLLM has cached."""
        sessions = [request for request in self.kv_holding_waiting if self._may_start(request)]
        if sessions or self.pause_state != PauseState.UNPAUSED:
            return sessions, {}
        ready = [request for request in islice(self.waiting, WAITING_WINDOW) if self._may_start(request)]
        cached = self._room.find_admissible(ready)
        return ready[: len(cached)], cached

    def _may_start(self, request: Request) -> bool:
        """Return whether vLLM would start a waiting request. Its own check, which also promotes one with a finished grammar, sees
        offered requests alone; pending output comes before a request starts again."""
        stale = request.num_stale_output_tokens and not request.drop_stale_output
        return self._handle_blocked_waiting_request(request) and not stale

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
