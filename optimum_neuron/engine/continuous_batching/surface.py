# SPDX-License-Identifier: Apache-2.0
"""transformers' continuous-batching surface over the engine: `generate_batch` and its manager."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput

from ... import progress
from ...artifact.artifact import Artifact
from ...config import NeuronConfig
from ...runtime.runner import GraphRunner
from ..engine import Engine
from ..policy import SchedulerOptions
from ..service import EngineService
from .manager import ContinuousBatchingManager
from .requests import RequestFactory, RequestOutcome


logger = logging.getLogger(__name__)


class ContinuousBatching:
    """The part of `NeuronModelForCausalLM` that serves more requests than there are slots."""

    artifact: Artifact
    config: Any
    generation_config: GenerationConfig
    neuron_config: NeuronConfig
    runner: GraphRunner
    settled: Callable[..., GenerationConfig]
    new_tokens: Callable[..., int | None]
    own_tokenizer: Callable[[], Any]
    _engine: Engine | None
    _served: bool
    _hold_slots: Callable[..., AbstractContextManager[None]]

    def generate_batch(
        self,
        inputs: Sequence[Sequence[int]],
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        persistent_manager: bool = False,
        warmup: bool = True,
        **kwargs: Any,
    ) -> dict[str, GenerationOutput]:
        """Generate for any number of prompts by continuous batching: a new prompt starts as soon as a slot is free.

        Args:
            inputs: token ids of each prompt, of any lengths, without padding.
            generation_config: how tokens are chosen; what it leaves out follows the model's.
            continuous_batching_config: `max_batch_tokens`, `scheduler_type`, `allow_block_sharing` (prefix reuse),
                `return_logprobs` and `seed` are honoured; what sizes memory or CUDA graphs draws a warning.
            record_timestamps: put the time of each token into the outputs.
            persistent_manager: keep the slots' contents, so that the next call may reuse their prefixes.
            warmup: run each graph once before the first request.
            kwargs: `max_new_tokens`.

        Returns:
            Outputs by request id, in the order of `inputs`; one that could not be served has an `error`.

        Raises:
            ValueError: the configs ask for what the engine or the artifact cannot do.
            TypeError: an unknown keyword.
        """
        max_new_tokens = kwargs.pop("max_new_tokens", None)
        if kwargs:
            raise TypeError(f"generate_batch got {', '.join(sorted(kwargs))}; set it in generation_config")
        factory = RequestFactory(self, generation_config, continuous_batching_config)
        with self._hold_slots(keep_engine=True):
            options, size, engine = factory.make_options(), self.artifact.model.vocab_size, self._engine
            if engine is None or engine.options != options:
                engine = Engine(self.runner, options, vocab_size=size, seed=factory.batching.seed)
            if warmup:
                self.runner.warm_up()
            outcomes = _list_outcomes(factory, inputs, timed=record_timestamps)
            shown = progress.stage("Generating", len(outcomes)) if progress_bar else nullcontext(lambda _: None)
            try:
                with shown as advance:
                    _run_batch(engine, factory, outcomes, max_new_tokens, advance)
            finally:
                engine.abort_requests()
            self._engine = engine if persistent_manager else None
        return {name: outcome.output for name, outcome in outcomes.items()}

    def make_requests(self, asked: Mapping[str, Any] = MappingProxyType({})) -> RequestFactory:
        """Return a maker of requests for a caller that ends texts at stop strings itself.

        `asked` are keywords of `generate` by which all of them choose tokens; ValueError where the artifact cannot do what they ask.
        """
        return RequestFactory(self, GenerationConfig(**asked), None, cuts_text=True)

    def serve(
        self, options: SchedulerOptions | None = None, *, seed: int | None = None, step_timeout: float | None = None
    ) -> EngineService:
        """Serve requests from any thread until the service is closed; `generate` refuses to run meanwhile.

            with model.serve() as service:
                for token_id in service.submit(Request(request_id="1", prompt_token_ids=prompt)):
                    ...

        Args:
            options, seed: as in `Engine`.
            step_timeout: as in `EngineService`.

        Raises:
            ValueError: the artifact cannot do what the options ask.
            RuntimeError: another service runs.
        """
        with self._hold_slots():
            engine = Engine(self.runner, options, vocab_size=self.artifact.model.vocab_size, seed=seed)
            self.runner.warm_up()
            self._served = True
        return EngineService(engine, lambda: setattr(self, "_served", False), step_timeout=step_timeout)

    def init_continuous_batching(
        self,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: Any = None,
    ) -> ContinuousBatchingManager:
        """Return a manager that takes requests at any time, to be started; see `generate_batch` for the configs.

        `workload_hints` help transformers to size a cache; this one was sized at export.
        """
        factory = RequestFactory(self, generation_config, continuous_batching_config)
        return ContinuousBatchingManager(
            factory, lambda: self.serve(factory.make_options(), seed=factory.batching.seed)
        )

    @contextmanager
    def continuous_batching_context_manager(
        self,
        generation_config: GenerationConfig | None = None,
        block: bool = True,
        timeout: float | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: Any = None,
    ) -> Iterator[ContinuousBatchingManager]:
        """`init_continuous_batching`, started and stopped; `block` and `timeout` are those of `stop`."""
        manager = self.init_continuous_batching(generation_config, continuous_batching_config, workload_hints)
        manager.start()
        try:
            yield manager
        finally:
            manager.stop(block=block, timeout=timeout)


def _list_outcomes(
    factory: RequestFactory, inputs: Sequence[Sequence[int]], *, timed: bool
) -> dict[str, RequestOutcome]:
    """Return outcomes by request id in the order of `inputs`, `num_return_sequences - 1` children before each."""
    children = range((factory.config.num_return_sequences or 1) - 1)
    outcomes = {}
    for number, prompt in enumerate(inputs):
        for name in (*(f"req_{number}__child#{child}" for child in children), f"req_{number}"):
            outcomes[name] = RequestOutcome(name, prompt, timed=timed, logprobs=factory.batching.return_logprobs)
    return outcomes


def _run_batch(
    engine: Engine,
    factory: RequestFactory,
    outcomes: Mapping[str, RequestOutcome],
    max_new_tokens: int | None,
    advance: Callable[[str], None],
) -> None:
    """Run all prompts to their ends; one that cannot be served, or fails, has an error in its output and stops no other."""
    for name, outcome in outcomes.items():
        try:
            engine.add_request(factory.make_request(name, outcome.prompt, max_new_tokens))
        except Exception as error:
            logger.error("%s", error)
            outcome.end_failed(str(error))
            advance(name)
    for event in engine.run_requests():
        if outcomes[event.request_id].add_event(event):
            advance(event.request_id)
