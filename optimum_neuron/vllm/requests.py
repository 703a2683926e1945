# SPDX-License-Identifier: Apache-2.0
"""The worker's state of a request between steps, and the table of them that a step's output updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.sampling_params import SamplingParams

from ..config import NeuronConfig
from ..runtime.step_rows import UniformStream
from ..step.spec import GREEDY
from ..step.spec import SamplingParams as OnDeviceParams
from .host_sampler import HostRequest
from .prompt_scores import PromptScores
from .sampling import host_reason, on_device_params


NO_ROW = -1


@dataclass
class RowState:
    """A request that has a row, or had one and was preempted.

    Attributes:
        slot: its row of a step; NO_ROW while it has none.
        prefill_token_ids: int32 `[n]`, what its row must hold before it decodes: the prompt and, after a preemption,
            the tokens that it had generated.
        sampling: how the graphs choose; greedy where the host samples.
        uniforms: its random numbers where the graphs draw with them.
        host: its part in vLLM's sampler where the graphs cannot sample for it.
        logprobs: whether it wants log-probabilities.
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
        """Return whether vLLM's sampler chooses its tokens."""
        return self.host is not None

    def restart_from(self, token_ids: Sequence[int]) -> None:
        """Begin again after a preemption.

        Args:
            token_ids: prompt and generated tokens as vLLM knows them. It may have dropped pending ones: they are
                chosen again, with the same random numbers.
        """
        self.prefill_token_ids = np.asarray(token_ids, dtype=np.int32)
        kept = len(token_ids) - len(self.prompt_token_ids)
        if self.uniforms is not None:
            self.uniforms.rewind_to(kept)
        if self.host is not None:
            self.host.rewind_to(kept)


class RequestTable:
    """All requests that vLLM has not finished, by id.

    Args:
        seed: of the engine; requests that bring no seed of their own draw from it, in the order of their arrival.
        all_on_host: whether the engine has processors of its own, which want every request's logits.
        mode: vLLM's logprobs_mode.
    """

    def __init__(self, config: NeuronConfig, seed: int, *, all_on_host: bool, mode: str, vocab_size: int) -> None:
        self._config = config
        self._mode, self._vocab_size = mode, vocab_size
        self._seeds = np.random.SeedSequence(seed)
        self._all_on_host = all_on_host
        self._states: dict[str, RowState] = {}

    def __getitem__(self, request_id: str) -> RowState:
        return self._states[request_id]

    def start_request(self, new: Any) -> RowState:
        """Take vLLM's NewRequestData. Of a known request it means a preemption, or with another prompt the next turn of a session."""
        known = self._states.get(new.req_id)
        if known is not None and known.prompt_token_ids == new.prompt_token_ids:
            known.restart_from(new.prefill_token_ids or new.prompt_token_ids)
            return known
        state = self._states[new.req_id] = self._make_state(new)
        if known is not None:
            state.slot = known.slot
        return state

    def leave_rows(self) -> None:
        """Take the rows from all requests."""
        for state in self._states.values():
            state.slot = NO_ROW

    def find_request(self, request_id: str) -> RowState | None:
        """Return a request; None where it is finished, or never got here."""
        return self._states.get(request_id)

    def finish_request(self, request_id: str) -> RowState | None:
        """Forget a request; return None where it never got here."""
        return self._states.pop(request_id, None)

    def _make_state(self, new: Any) -> RowState:
        params: SamplingParams = new.sampling_params
        prompt = list(new.prompt_token_ids)
        state = RowState(new.req_id, prompt, np.asarray(prompt, dtype=np.int32))
        if params.prompt_logprobs is not None:
            state.prompt_scores = PromptScores(prompt, params.prompt_logprobs, self._mode, self._vocab_size)
        if self._all_on_host or host_reason(params, self._config) is not None:
            state.host = HostRequest(new.req_id, prompt, params)
            return state
        state.sampling, state.logprobs = on_device_params(params), params.logprobs is not None
        if state.sampling.temperature > 0:
            # As `Engine` seeds it. NumPy takes no negative seed, which vLLM allows.
            seed = self._seeds.spawn(1)[0]
            state.uniforms = UniformStream(
                seed if params.seed is None else np.random.SeedSequence(params.seed % (1 << 64))
            )
        return state
