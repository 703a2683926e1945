# SPDX-License-Identifier: Apache-2.0
"""vLLM's own sampler, for the requests that the graphs cannot sample: penalties, logprobs, grammars, processors."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.outputs import LogprobsLists
from vllm.v1.sample.logits_processor import build_logitsprocs
from vllm.v1.sample.sampler import Sampler
from vllm.v1.structured_output.utils import apply_grammar_bitmask
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch


# Tokens of a request that vLLM may drop: those of the steps that async scheduling has on their way at once.
MOST_DROPPED = 2


class HostRequest:
    """A request as vLLM's sampler knows it. Only its own tokens use its generator."""

    def __init__(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        generator = None
        self._states: dict[int, Tensor] = {}  # of the generator, before each of the last tokens
        if params.sampling_type == SamplingType.RANDOM_SEED:
            generator = torch.Generator().manual_seed(params.seed)
        self.state = CachedRequestState(
            req_id=request_id,
            prompt_token_ids=prompt_token_ids,
            mm_features=[],
            sampling_params=params,
            generator=generator,
            block_ids=([],),
            num_computed_tokens=0,
            output_token_ids=[],
        )

    def note_token(self) -> None:
        """Note the random numbers that the next token is drawn with."""
        if self.state.generator is not None:
            chosen = len(self.state.output_token_ids)
            self._states[chosen] = self.state.generator.get_state()
            self._states.pop(chosen - MOST_DROPPED, None)

    def rewind_to(self, kept: int) -> None:
        """Forget all tokens but the first `kept`: the next one is drawn with the random numbers of the first that is forgotten."""
        chosen = self.state.output_token_ids
        if self.state.generator is not None and kept < len(chosen):
            if kept not in self._states:
                raise RuntimeError(
                    f"vLLM drops {len(chosen) - kept} tokens of request {self.state.req_id}, and {MOST_DROPPED} may be on their "
                    f"way; this is a fault of the plugin"
                )
            self.state.generator.set_state(self._states[kept])
        del chosen[kept:]


class HostSampler:
    """The requests that get a token in a step, as one batch of vLLM's sampler.

    The batch is kept between steps: as long as the same requests get tokens, nothing of it is built again.
    """

    def __init__(self, vllm_config: VllmConfig, slots: int, vocab_size: int) -> None:
        model = vllm_config.model_config
        device = torch.device("cpu")
        self.processors = tuple(model.logits_processors or ())
        arguments: dict[str, Any] = {
            "max_num_reqs": slots,
            "max_model_len": model.max_model_len,
            "max_num_batched_tokens": vllm_config.scheduler_config.max_num_batched_tokens,
            "device": device,
            "vocab_size": vocab_size,
            "block_sizes": [model.max_model_len],
            "max_num_blocks_per_req": [1],
            "kernel_block_sizes": [model.max_model_len],
            "pin_memory": False,
            "logitsprocs": build_logitsprocs(vllm_config, device, False, False, self.processors),
            "logitsprocs_need_output_token_ids": bool(self.processors),
            "reasoning_config": getattr(vllm_config, "reasoning_config", None),
        }
        # Its arguments differ between vLLM's versions.
        known = inspect.signature(InputBatch.__init__).parameters
        self._batch = InputBatch(**{name: value for name, value in arguments.items() if name in known})
        self._sampler = Sampler(logprobs_mode=model.logprobs_mode, use_fp64_gumbel=model.use_fp64_gumbel)

    def remove_request(self, request_id: str) -> None:
        """Forget a request; do nothing where it is not in the batch."""
        self._batch.remove_request(request_id)

    def sample_tokens(
        self, requests: Sequence[HostRequest], logits: Tensor, scheduler_output: Any, grammar: Any | None
    ) -> tuple[list[str], list[int], LogprobsLists | None]:
        """Return request ids, their next tokens, added to their output tokens, and logprobs where one of them asked, in one order.

        Args:
            logits: `[requests, vocab]` float32, in the requests' order; overwritten.
            grammar: bit masks of structured output, or None.
        """
        logits = self._arrange_batch(requests, logits)
        batch = self._batch
        for request in requests:
            request.note_token()
        if grammar is not None:
            apply_grammar_bitmask(scheduler_output, grammar, batch, logits)
        output = self._sampler(logits, batch.sampling_metadata)
        tokens = output.sampled_token_ids[:, 0].tolist()
        by_id = {request.state.req_id: request.state for request in requests}
        for row, (request_id, token) in enumerate(zip(batch.req_ids, tokens, strict=True)):
            state = by_id[request_id]
            place = state.num_tokens
            state.output_token_ids.append(token)
            if place < batch.max_model_len:
                batch.token_ids_cpu[row, place] = token
                batch.is_token_ids[row, place] = True
                batch.num_tokens_no_spec[row] = place + 1
        logprobs = None if output.logprobs_tensors is None else output.logprobs_tensors.tolists()
        return list(batch.req_ids), tokens, logprobs

    def _arrange_batch(self, requests: Sequence[HostRequest], logits: Tensor) -> Tensor:
        """Make the batch hold exactly these requests; return their logits in the batch's order."""
        batch = self._batch
        wanted = {request.state.req_id: row for row, request in enumerate(requests)}
        if batch.req_id_to_index.keys() != wanted.keys():
            for request_id in [known for known in batch.req_id_to_index if known not in wanted]:
                batch.remove_request(request_id)
            for request in requests:
                if request.state.req_id not in batch.req_id_to_index:
                    batch.add_request(request.state)
        # Also where the requests are the same: one before them may have been removed, and processors see new tokens.
        batch.condense()
        batch.refresh_metadata()
        rows = [wanted[request_id] for request_id in batch.req_ids]
        return logits if rows == list(range(len(rows))) else logits[np.asarray(rows)]
