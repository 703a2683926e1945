# SPDX-License-Identifier: Apache-2.0
"""vLLM's own sampler, for what the graphs cannot sample: penalties, grammars, processors; and log-probabilities as vLLM takes them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.sample.logits_processor import build_logitsprocs
from vllm.v1.sample.sampler import Sampler
from vllm.v1.structured_output.utils import apply_grammar_bitmask
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from ..runtime.logprobs import TokenLogprobs


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
    """The requests that get a token in a step, as one batch of vLLM's sampler, which is kept as long as these are the same."""

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

        `logits` `[requests, vocab]` float32 are overwritten; `grammar` has bit masks of structured output.
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


def join_logprobs(
    on_device: Sequence[tuple[str, int, TokenLogprobs]],
    on_host: Sequence[str],
    host_table: LogprobsLists | None,
    ids: Sequence[str],
) -> LogprobsLists | None:
    """Return one table of both; None where no request wants any.

    Args:
        on_device: requests that want log-probabilities of the graphs, with their tokens.
        on_host, host_table: requests of vLLM's sampler, and their rows.
        ids: all requests of the step, in vLLM's order: those without log-probabilities get any row, and look at none.
    """
    rows, tables = [request_id for request_id, _, _ in on_device], []
    if on_device:  # in each row the token itself, then the most likely ones
        tables.append(
            LogprobsLists(
                np.array([[token, *each.tokens.tolist()] for _, token, each in on_device], dtype=np.int32),
                np.array([[float(each.chosen), *each.best.tolist()] for *_, each in on_device], dtype=np.float32),
                np.array([int(each.ranks) for *_, each in on_device], dtype=np.int32),
            )
        )
    if host_table is not None:
        rows += on_host
        tables.append(host_table)
    if not tables:
        return None
    width = max(table.logprobs.shape[1] for table in tables)
    places = {request_id: row for row, request_id in enumerate(rows)}
    return LogprobsLists(
        np.concatenate([_widen_table(table.logprob_token_ids, width, 0) for table in tables]),
        np.concatenate([_widen_table(table.logprobs, width, -np.inf) for table in tables]),
        np.concatenate([table.sampled_token_ranks for table in tables]),
        [places.get(request_id, 0) for request_id in ids],
    )


def _widen_table(table: np.ndarray, width: int, fill: float) -> np.ndarray:
    """Add columns that no request reads: each reads as many as it asked for."""
    return np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=fill)


class PromptScores:
    """Log-probabilities of each token of a prompt but the first, filled piece by piece from the logits of graphs that score.

    Args:
        count: most likely tokens in each place, next to the prompt's own; -1: all of the vocabulary.
        mode: vLLM's logprobs_mode; what changes logits where a token is chosen changes none of a prompt's.

    Attributes:
        table: what vLLM takes: a row for each such token, its own first, then the most likely ones.
        last: place of the prompt's last token, the only one with logits that choose no token of the prompt.
    """

    def __init__(self, prompt_token_ids: Sequence[int], count: int, mode: str, vocab_size: int) -> None:
        self._next = torch.tensor(prompt_token_ids[1:], dtype=torch.int64)
        self.last = len(self._next)
        self._count = vocab_size if count == -1 else count
        self._logits = mode.endswith("logits")
        self.table = LogprobsTensors.empty_cpu(len(self._next), self._count + 1)

    def add_logits(self, start: int, logits: Tensor) -> None:
        """Fill rows from logits `[tokens, vocab]` float32 of consecutive tokens, the first of them at `start`."""
        own = self._next[start : start + len(logits), None]
        scores = logits[: len(own)] if self._logits else logits[: len(own)].log_softmax(-1)
        chosen, best = scores.gather(-1, own), scores.topk(self._count)
        rows = slice(start, start + len(own))
        self.table.logprob_token_ids[rows] = torch.cat([own, best.indices], dim=1).int()
        self.table.logprobs[rows] = torch.cat([chosen, best.values], dim=1)
        self.table.selected_token_ranks[rows] = (scores >= chosen).sum(-1).int()
