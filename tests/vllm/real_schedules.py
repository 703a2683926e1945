# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler over a worker with a SlotModel, and random workloads for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from running_ahead import AheadOf, ahead_of
from scheduler_outputs import GREEDY, random_prompt
from slot_model import MODEL, STATEFUL, SlotModel, answer, slot_runner, uniforms
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from optimum_neuron.step.spec import GREEDY as GREEDILY
from optimum_neuron.step.spec import SamplingParams as SampledOnDevice
from optimum_neuron.vllm.model_runner import ModelRunner
from optimum_neuron.vllm.options import find_served
from optimum_neuron.vllm.prefixes import StepPlan


class Served:
    """An engine without processes: schedules, runs, and hands the output back, as vLLM's core does.

    With async scheduling a step is scheduled while the one before it is still to be handed back.

    Attributes:
        device: what counts its transfers, where it runs ahead.
        steps, runs: of each step that has any, counts as vLLM put them, and what the graphs did.
        reused: of each step, request to how many tokens it took over.
        most_in_flight: steps with tokens that were on their way at once, at most.
    """

    def __init__(self, vllm_config: VllmConfig, *, ahead: bool = False, **sizes: Any) -> None:
        served = find_served(vllm_config)
        assert served is not None
        keeps_state = not served.artifact.model.reuses_prefixes
        graphs = slot_runner(keeps_state=keeps_state, **{**served.artifact.config.to_dict(), **sizes})
        self.sizes = graphs.config
        blocks, length = self.sizes.kv_blocks + 1, vllm_config.cache_config.block_size
        assert isinstance(graphs.executable, SlotModel)
        self.model: SlotModel = graphs.executable
        self.device: AheadOf | None = None
        if ahead:
            graphs, self.device = ahead_of(graphs, STATEFUL if keeps_state else None)
        self.worker = ModelRunner(graphs, MODEL, vllm_config)
        vllm_config.cache_config.num_gpu_blocks = blocks
        group = KVCacheGroupSpec(
            ["slots"], FullAttentionSpec(block_size=length, num_kv_heads=1, head_size=1, dtype=torch.int8)
        )
        self.scheduler: Any = vllm_config.scheduler_config.get_scheduler_cls()(
            vllm_config=vllm_config,
            kv_cache_config=KVCacheConfig(blocks, [], [group]),
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=length,
            hash_block_size=length,
            include_finished_set=False,
            log_stats=False,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(length, sha256)
        self.most_in_flight = 0
        self.in_flight: deque[tuple[SchedulerOutput, Callable[[], ModelRunnerOutput]]] = deque()
        self.depth = 2 if vllm_config.scheduler_config.async_scheduling else 1
        self.requests: dict[str, Request] = {}
        self.steps: list[dict[str, int]] = []
        self.runs: list[list[str]] = []
        self.reused: list[dict[str, int]] = []
        # A row is some request's n-th token.
        self._rows: list[list[tuple[Request, int]]] = [[] for _ in range(self.sizes.batch_size)]
        self.slot_of: dict[str, int] = {}

    def add(self, name: str, prompt: Sequence[int], new_tokens: int, **options: Any) -> Request:
        how = {option: options.pop(option) for option in ("priority", "resumable") if option in options}
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True, **{**GREEDY, **options})
        how |= {"arrival_time": float(len(self.requests)), "block_hasher": self._hasher}
        request = Request(name, list(prompt), params, None, **how)
        self.requests.setdefault(name, request)
        self.scheduler.add_request(request)
        return request

    def turn(self, name: str, prompt: Sequence[int], new_tokens: int) -> None:
        """More input for a session, which is a request that was added as resumable."""
        self.add(name, prompt, new_tokens, resumable=True)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def reset(self, forget: bool) -> None:
        """As the server's endpoint does: preempts all, also while a step is on its way."""
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=forget)

    def step(self) -> None:
        """Schedules and runs a step, and hands back the oldest one where as many as vLLM allows are on their way."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            before = len(self.model.runs)
            if self.sizes.kv_block_size is None:
                self._replay(output)
            else:
                self._note_hits(output)
            self.worker.execute_step(output)
            result = self.worker.sample_step(None)
            if output.total_num_scheduled_tokens:
                self.steps.append(dict(output.num_scheduled_tokens))
                self.runs.append(self.model.runs[before:])
            self.in_flight.append((output, result))
            busy = sum(made.total_num_scheduled_tokens > 0 for made, _ in self.in_flight)
            self.most_in_flight = max(self.most_in_flight, busy)
            if len(self.in_flight) < self.depth and output.total_num_scheduled_tokens:
                return
        if self.in_flight:
            output, result = self.in_flight.popleft()
            self.scheduler.update_from_output(output, result())

    def _note_hits(self, output: SchedulerOutput) -> None:
        """What requests that start take over, of vLLM's own prefix cache; that it is theirs, their answers tell."""
        cached = output.scheduled_cached_reqs
        started = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        known = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        started |= {name: computed for name, computed in known if name in cached.resumed_req_ids}
        if output.total_num_scheduled_tokens:
            self.reused.append({name: computed for name, computed in started.items() if computed})

    def _replay(self, output: SchedulerOutput) -> None:
        """Follows what slots hold by what vLLM was told alone, and checks every plan against it."""
        plan = output.kv_connector_metadata or StepPlan()
        assert isinstance(plan, StepPlan)
        if output.total_num_scheduled_tokens:
            self.reused.append({name: prefix.length for name, prefix in plan.prefixes.items()})
        cached = output.scheduled_cached_reqs
        slots = {new.req_id: new.block_ids[0][0] - 1 for new in output.scheduled_new_reqs}
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                assert blocks is not None
                slots[name] = blocks[0][0] - 1
        assert plan.slots.keys() in ({*slots}, set())  # vLLM's blocks are slots where nothing is reused
        slots |= plan.slots
        goes_on = {new.req_id: (slots[new.req_id], new.num_computed_tokens) for new in output.scheduled_new_reqs}
        starting = [name for name in output.num_scheduled_tokens if name in slots]
        assert set(plan.prefixes) <= set(starting)
        for name in starting:
            source, length = goes_on.get(name, (0, 0))  # without a prefix, the next turn of a session
            if name in plan.prefixes:
                source, length = plan.prefixes[name].source, plan.prefixes[name].length
            copied = self._rows[source][:length]
            # A token that vLLM counts as computed while it is on its way is None here: nobody may reuse its row.
            held = [dict(enumerate(request.all_token_ids)).get(index) for request, index in copied]
            assert held == list(self.requests[name].all_token_ids[:length]), f"slot {source} holds other tokens"
            self._rows[slots[name]] = list(copied)
            self.slot_of[name] = slots[name]
        for name, count in output.num_scheduled_tokens.items():
            rows = self._rows[self.slot_of[name]]
            rows += [(self.requests[name], len(rows) + index) for index in range(count)]

    def run(self, limit: int = 2000) -> None:
        """Steps until all requests are finished."""
        for _ in range(limit):
            if not self.scheduler.has_requests() and not self.in_flight:
                return
            self.step()
        raise AssertionError(f"requests are not finished after {limit} steps: {self.unfinished()}")

    def finish(self) -> None:
        """Steps until all requests are finished, and checks their answers."""
        self.run()
        self.check_answers()

    @property
    def hits(self) -> dict[str, int]:
        """Requests that went on behind a prefix, with the tokens that they did not compute."""
        return {name: length for step in self.reused for name, length in step.items() if length}

    def unfinished(self) -> list[str]:
        return [name for name, request in self.requests.items() if not request.is_finished()]

    def check_answers(self) -> None:
        """Every request got the tokens that follow its prompt, all of them unless it was aborted."""
        for name, request in self.requests.items():
            tokens, params, prompt = list(request.output_token_ids), request.sampling_params, request.prompt_token_ids
            assert prompt is not None and params is not None
            sampling = GREEDILY
            if params.temperature:
                sampling = SampledOnDevice(params.top_k, params.top_p, params.temperature)
            assert tokens == answer(prompt, len(tokens), sampling, uniforms(params.seed, len(tokens))), name
            if request.status != RequestStatus.FINISHED_ABORTED:
                room = self.scheduler.max_model_len - len(prompt)
                assert len(tokens) == min(request.max_tokens, room), name

    def first_steps(self) -> Iterator[str]:
        """Requests in the order of their first step."""
        seen: dict[str, None] = {}
        for counts in self.steps:
            seen.update(dict.fromkeys(counts))
        return iter(seen)


def check_all_is_free(engine: Served) -> None:
    """No block is anybody's, and every row is free."""
    engine.worker.execute_step(engine.scheduler.schedule())  # tells the worker who ended last
    manager = engine.scheduler.kv_cache_manager
    assert manager.block_pool.get_num_free_blocks() == engine.sizes.kv_blocks
    assert manager.usage == 0
    runner = engine.worker.runner
    assert runner.tables is not None and not runner.tables.counts.any() and not runner.lengths.any()


Action = tuple[str, Any]

SEEDED = {"temperature": 1.0, "top_k": 50, "seed": 5}
HOST = {"logprobs": 1}
TOPICS = 3


def workloads(
    shared: int, own: int, new_tokens: int, steps: int, aborted: int, most: int
) -> st.SearchStrategy[list[Action]]:
    """Actions: a request (topic, shared tokens, own tokens, new tokens, parameters), an abort, a reset, or some steps.

    The numbers are the most that there are: the tokens of a prompt that others of its topic share, its own tokens, those of an answer,
    the steps of one action, the number of an aborted request, which need not exist, and the actions.
    """
    request = st.tuples(
        st.integers(0, TOPICS - 1),
        st.integers(0, shared),
        st.integers(1, own),
        st.integers(1, new_tokens),
        st.sampled_from([{}, SEEDED, HOST]),
    ).map(lambda request: ("add", request))
    others = (
        st.tuples(st.just("step"), st.integers(1, steps)),
        st.tuples(st.just("abort"), st.integers(0, aborted)),
        st.tuples(st.just("reset"), st.booleans()),
    )
    return st.lists(st.one_of(request, request, *others), min_size=1, max_size=most)


def play(engine: Served, actions: Sequence[Action]) -> None:
    """Does all actions, and steps until every request is finished; all answers and the sizes of steps are checked."""
    topics = [random_prompt(engine.sizes.sequence_length, seed) for seed in range(TOPICS)]
    for kind, value in actions:
        if kind == "add":
            topic, shared, own, new_tokens, params = value
            number = len(engine.requests)
            prompt = topics[topic][:shared] + random_prompt(own, number % 4)
            engine.add(f"r{number}", prompt, new_tokens, priority=number % 3, **params)
        elif kind == "step":
            for _ in range(value):
                engine.step()
        elif kind == "abort":
            engine.abort(f"r{value}")
        else:
            engine.reset(value)
    engine.finish()
    budget = engine.scheduler.scheduler_config.max_num_batched_tokens
    assert all(sum(counts.values()) <= budget for counts in engine.steps)
    if budget <= engine.sizes.step_capacity and engine.sizes.mixed_step:
        assert all(len(runs) <= 1 for runs in engine.runs)
