# SPDX-License-Identifier: Apache-2.0
"""The manager of transformers' continuous batching over an engine's thread: requests in, outputs out, at any time."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from transformers.generation.continuous_batching.requests import GenerationOutput

from ...runtime.process import OwnProcess
from ..events import TokenEvent
from ..service import EngineService, Item
from .requests import RequestFactory, RequestOutcome


logger = logging.getLogger(__name__)


class ContinuousBatchingManager:
    """Takes requests from any thread while others run. Made by `NeuronModelForCausalLM.init_continuous_batching`.

    Its methods are those of the manager in transformers. Between `start` and `stop` `generate` refuses to run.
    """

    def __init__(self, factory: RequestFactory, serve: Callable[[], EngineService]) -> None:
        self._factory = factory
        self._serve = serve
        self._service: EngineService | None = None
        self._numbers = itertools.count()
        self._arrived = threading.Condition()
        self._ready: list[GenerationOutput] = []
        self._handlers: dict[str, Callable[[GenerationOutput], object]] = {}
        self._open = 0
        self._process = OwnProcess()

    def start(self) -> None:
        """Take over the model's slots and let requests in; RuntimeError where another manager or service runs."""
        if self._service is None:
            self._service = self._serve()

    def stop(self, block: bool = True, timeout: float | None = None, hard_stop: bool = False) -> None:
        """Let the requests finish, unless `hard_stop`, and give the slots back; wait for that where `block` says so.

        Requests that still run after `timeout` seconds are aborted. Outputs can be read afterwards.
        """
        service, self._service = self._service, None
        if service is None or not self._process.is_here:
            return

        def close() -> None:
            service.close(finish=not hard_stop)
            with self._arrived:
                self._arrived.notify_all()

        closing = threading.Thread(target=close, daemon=True)
        closing.start()
        if block:
            closing.join(timeout)
            if closing.is_alive():
                logger.warning("requests were aborted: they did not finish in %s s", timeout)
                service.close()
                closing.join()

    def is_running(self) -> bool:
        """Return whether requests are taken."""
        return self._service is not None and self._service.stopped is None

    @property
    def background_thread_status(self) -> SimpleNamespace:
        """Its `fatal_error` is what ended the engine; None where it runs, or was stopped."""
        return SimpleNamespace(fatal_error=None if self._service is None else self._service.failure)

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], object]) -> None:
        """Have the running event loop call a function with each output of a request, those included that are there."""
        loop = asyncio.get_running_loop()
        with self._arrived:
            self._handlers[request_id] = lambda output: loop.call_soon_threadsafe(callback, output)
            while (index := self._find_output(request_id)) is not None:
                self._hand_over(self._ready.pop(index))

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | Sequence[int] | None = None,
        **processor_options: Any,
    ) -> str:
        """Queue a prompt and returns its id.

        Args:
            streaming: deliver an output per token; otherwise only the finished one.
            processor_options: none is supported; they would need processors of each request's own.

        Raises:
            RuntimeError: the manager is not started, or this process was forked from the one where it is.
        """
        if processor_options:
            raise TypeError(
                f"{', '.join(processor_options)}: all requests of a manager share its generation_config; set it there"
            )
        self._process.check_fork()
        service = self._service
        if service is None:
            raise RuntimeError("the manager is not running; call start() first")
        request_id = f"req_{next(self._numbers)}" if request_id is None else request_id
        logprobs = self._factory.batching.return_logprobs
        outcome = RequestOutcome(request_id, input_ids, timed=record_timestamps, logprobs=logprobs)
        with self._arrived:
            self._open += 1
        try:
            ids = [eos_token_id] if isinstance(eos_token_id, int | float) else eos_token_id
            eos = None if ids is None else frozenset(token for token in ids if token >= 0)
            request = self._factory.make_request(request_id, input_ids, max_new_tokens, eos)
            service.subscribe(request, partial(self._deliver_item, outcome, streaming))
        except Exception as error:
            logger.error("%s", error)
            outcome.end_failed(str(error))
            self._put_output(outcome.output)
        return request_id

    def add_requests(self, inputs: Sequence[Sequence[int]], **options: Any) -> list[str]:
        """Queue prompts; the options are those of `add_request`."""
        return [self.add_request(prompt, **options) for prompt in inputs]

    def cancel_request(self, request_id: str) -> None:
        """End a request soon; its output has an error."""
        if self._service is not None:
            self._service.abort_request(request_id)

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """Return the next output, of one request where that is named; None after `timeout` seconds, or where none can come."""
        self._process.check_fork()
        with self._arrived:
            self._arrived.wait_for(
                lambda: self._find_output(request_id) is not None or not (self.is_running() or self._open), timeout
            )
            index = self._find_output(request_id)
            return None if index is None else self._ready.pop(index)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Yield outputs as they come, until the manager is stopped and all are read."""
        while (output := self.get_result()) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Yield the outputs of one request, until it is finished."""
        while (output := self.get_result(request_id)) is not None:
            yield output
            if output.is_finished() or output.error is not None:
                return

    def _find_output(self, request_id: str | None) -> int | None:
        wanted = (index for index, output in enumerate(self._ready) if request_id in (None, output.request_id))
        return next(wanted, None)

    def _deliver_item(self, outcome: RequestOutcome, streaming: bool, item: Item) -> None:
        """Called by the engine's thread."""
        if not isinstance(item, TokenEvent):
            outcome.end_failed("the request was cancelled" if isinstance(item, str) else str(item))
        elif not outcome.add_event(item):
            if streaming:
                tokens = list(outcome.output.generated_tokens)
                self._put_output(replace(outcome.output, generated_tokens=tokens), ended=False)
            return
        self._put_output(outcome.output)

    def _put_output(self, output: GenerationOutput, *, ended: bool = True) -> None:
        with self._arrived:
            self._hand_over(output)
            self._open -= ended
            self._arrived.notify_all()

    def _hand_over(self, output: GenerationOutput) -> None:
        """Give an output to the request's handler, or keep it for `get_result`."""
        over = output.is_finished() or output.error is not None
        handler = self._handlers.pop(output.request_id, None) if over else self._handlers.get(output.request_id)
        (handler or self._ready.append)(output)
