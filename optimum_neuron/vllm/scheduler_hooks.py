# SPDX-License-Identifier: Apache-2.0
"""The parts of vLLM's scheduler that the plugin uses and that are no interface of it: each name once, here, with the reason."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request


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


class HookedScheduler(Scheduler):
    """vLLM's scheduler with hooks for where a prompt starts and how much of it a step takes.

    tests/vllm/test_surface.py compares each name with the supported versions of vLLM.
    """

    def find_prompt_start(self, request: Request, cached: int) -> int:
        """Return how many of the `cached` tokens of vLLM's prefix cache a request that starts takes over."""
        return cached

    def limit_tokens(self, request: Request, start: int, tokens: int) -> int:
        """Return how many of `tokens`, from place `start` on, a request gets in this step."""
        return tokens

    def may_start(self, request: Request) -> bool:
        """Return whether vLLM would start a waiting request. vLLM promotes requests with a finished grammar by the same
        check, and makes it for offered requests alone; pending output comes before a request starts again."""
        stale = request.num_stale_output_tokens and not request.drop_stale_output
        return self._handle_blocked_waiting_request(request) and not stale

    def count_reserved(self) -> int:
        """Return the blocks that prompts under way still need. vLLM has no public count."""
        return int(self._inflight_prefill_reserved_blocks())

    def _get_local_prefix_cache_hit(self, request: Request, *limits: Any) -> tuple[Any, int, Any, bool]:
        """Cut a hit to where state of its rows was kept: vLLM has groups for such state only where its own kernels keep it.

        Args:
            limits: from vLLM 0.33 on, the longest hit that is allowed.
        """
        blocks, cached, boundary, diverged = super()._get_local_prefix_cache_hit(request, *limits)
        tokens = self.find_prompt_start(request, cached)
        if tokens != cached:
            blocks = self.kv_cache_manager.truncate_computed_blocks(blocks, tokens)
        return blocks, tokens, boundary, diverged

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Cut a request's tokens: the last hook before vLLM takes blocks for them, and the only one for each request."""
        tokens = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        return self.limit_tokens(request, num_computed_tokens, tokens)
