# SPDX-License-Identifier: Apache-2.0
"""The worker's requests between steps, and their rows, with the blocks in each as vLLM's block manager gave them out.

Block 0 of vLLM's is never given out, so that its block b is block b - 1 of the artifact. Where the cache has slots, a request
has one block, and its row has the same number; the step's plan may name another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np
from vllm.sampling_params import SamplingParams

from ..config import NeuronConfig
from ..core import Prefix
from ..runtime.prefill import cut_prompt
from ..runtime.runner import GraphRunner
from ..runtime.step_rows import StepRows, UniformStream
from ..step.spec import GREEDY
from ..step.spec import SamplingParams as OnDeviceParams
from .host_sampler import HostRequest, PromptScores
from .sampling import host_reason, on_device_params


NO_ROW = -1


@dataclass
class RowState:
    """A request that has a row, or had one and was preempted.

    Attributes:
        slot: its row of a step; NO_ROW while it has none.
        prefill_token_ids: int32 `[n]`, what its row must hold before it decodes: the prompt, and what it had when it was preempted.
        sampling, uniforms: how the graphs choose, greedy where the host samples, and their random numbers.
        host: its part in vLLM's sampler where the graphs cannot sample for it.
        prompt_scores: log-probabilities of its prompt, until vLLM has them; None where it wants none.
    """

    request_id: str
    prompt_token_ids: list[int]
    prefill_token_ids: np.ndarray
    slot: int = NO_ROW
    sampling: OnDeviceParams = GREEDY
    uniforms: UniformStream | None = None
    host: HostRequest | None = None
    logprobs: bool = False
    prompt_scores: PromptScores | None = None

    @property
    def on_host(self) -> bool:
        return self.host is not None

    def restart_from(self, token_ids: Sequence[int]) -> None:
        """Begin again after a preemption. Tokens that vLLM has dropped are chosen again, with the same random numbers."""
        self.prefill_token_ids = np.asarray(token_ids, dtype=np.int32)
        kept = len(token_ids) - len(self.prompt_token_ids)
        if self.uniforms is not None:
            self.uniforms.rewind_to(kept)
        if self.host is not None:
            self.host.rewind_to(kept)


class RequestTable(dict[str, RowState]):
    """All requests that vLLM has not finished, by id.

    Args:
        seed: of the engine; requests that bring no seed of their own draw from it, in the order of their arrival.
        all_on_host: whether the engine has processors of its own, which want every request's logits.
    """

    def __init__(self, config: NeuronConfig, seed: int, *, all_on_host: bool, mode: str, vocab_size: int) -> None:
        super().__init__()
        self._config, self._all_on_host = config, all_on_host
        self._mode, self._vocab_size = mode, vocab_size
        self._seeds = np.random.SeedSequence(seed)

    def start_request(self, new: Any) -> RowState:
        """Take vLLM's NewRequestData. Of a known request it means a preemption, or with another prompt the next turn of a session."""
        known = self.get(new.req_id)
        if known is not None and known.prompt_token_ids == new.prompt_token_ids:
            known.restart_from(new.prefill_token_ids or new.prompt_token_ids)
            return known
        params: SamplingParams = new.sampling_params
        prompt = list(new.prompt_token_ids)
        state = self[new.req_id] = RowState(new.req_id, prompt, np.asarray(prompt, dtype=np.int32))
        if known is not None:
            state.slot = known.slot
        if params.prompt_logprobs is not None:
            state.prompt_scores = PromptScores(prompt, params.prompt_logprobs, self._mode, self._vocab_size)
        if self._all_on_host or host_reason(params, self._config) is not None:
            state.host = HostRequest(new.req_id, prompt, params)
            return state
        state.sampling, state.logprobs = on_device_params(params), params.logprobs is not None
        if state.sampling.temperature > 0:
            seed = self._seeds.spawn(1)[0]
            if params.seed is not None:  # as `Engine` seeds it; NumPy takes no negative seed, which vLLM allows
                seed = np.random.SeedSequence(params.seed % (1 << 64))
            state.uniforms = UniformStream(seed)
        return state


class CacheRows:
    """The rows of the cache. Requests start with tokens that were computed before, or that a prompt of this very step computes:
    graphs write a layer's keys and values before they read any."""

    def __init__(self, rows: StepRows[RowState], runner: GraphRunner) -> None:
        self._rows, self._runner = rows, runner
        self._has_slots = runner.tables is None
        self._free = list(range(runner.config.batch_size))

    def start_request(self, state: RowState, blocks: Sequence[int], computed: int, prefix: Prefix | None) -> None:
        """Give a request a row that holds its first `computed` tokens, where they are not in vLLM's blocks by those of a prefix."""
        runner, held = self._runner, state.slot
        if self._has_slots:
            state.slot = blocks[0] - 1
        elif held == NO_ROW:
            state.slot = heappop(self._free)
        has_turn = computed > 0 and prefix is None  # the next turn of a session, or whole blocks of a prompt
        if self._has_slots and has_turn and held == state.slot and runner.lengths[held] == computed:
            self._rows.start_request(state, resets=False)
            return
        self._rows.start_request(state)
        self.extend_row(state, blocks if not self._has_slots else [state.slot + 1])
        if prefix is not None and prefix.source is not None and prefix.source != state.slot:
            runner.copy_block(prefix.source, state.slot, prefix.length)
        if has_turn and runner.kept.needed:
            # A step that was under way when the session's last turn ended has added a token that vLLM drops, and a slot's state is
            # of all its tokens.
            for piece in cut_prompt(state.slot, state.prefill_token_ids[:computed], runner.config.prefill_chunk_size):
                runner.run_step([piece], outputs=False)
        elif computed and (prefix is not None or not self._has_slots or held == state.slot):
            runner.resume_slot(state.slot, computed, None if prefix is None else prefix.state)

    def extend_row(self, state: RowState, blocks: Sequence[int]) -> None:
        """Give a request that has a row more of vLLM's blocks."""
        tables = self._runner.tables
        first = 0 if tables is None else int(tables.counts[state.slot])
        self._runner.assign_blocks(state.slot, first, [block - 1 for block in blocks])

    def release_row(self, state: RowState) -> None:
        """Take the row from a request that has ended or was preempted; do nothing where it has none."""
        if not self._has_slots and state.slot != NO_ROW:
            self._runner.reset_slot(state.slot)
            heappush(self._free, state.slot)
        state.slot = NO_ROW
