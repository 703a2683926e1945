# SPDX-License-Identifier: Apache-2.0
"""Which requests can be served at all. Knows nothing of other requests; imports no torch."""

from __future__ import annotations

from ..config import NeuronConfig
from ..runtime.lengths import check_length
from .request import Request


def check_request(request: Request, config: NeuronConfig, *, largest_step: int, decodes_beside: int) -> int:
    """How many tokens a request gets at most, where it can be served.

    Args:
        largest_step: tokens of a step, decodes and prompt tokens together.
        decodes_beside: most decodes that a step may hold beside a prompt.

    Raises:
        ValueError: no step or no slot could ever hold the request.
    """
    who, prompt = f"request {request.request_id!r}", len(request.prompt_token_ids)
    most = check_length(prompt, request.max_new_tokens, config, f"the prompt of {who}")
    if request.atomic:
        _check_atomic(who, prompt, config, largest_step - decodes_beside)
    return most


def _check_atomic(who: str, prompt: int, config: NeuronConfig, budget: int) -> None:
    if prompt > config.prompt_capacity:
        raise ValueError(
            f"{who} is atomic with {prompt} prompt tokens, but one step takes in at most ctx_batch_size * "
            f"prefill_chunk_size = {config.ctx_batch_size} * {config.prefill_chunk_size} = {config.prompt_capacity}; export with a larger "
            f"prefill_chunk_size"
        )
    if prompt > budget:
        raise ValueError(
            f"{who} is atomic with {prompt} prompt tokens, but max_step_tokens leaves {budget} for prompts while the other "
            f"slots decode; raise max_step_tokens by {prompt - budget}"
        )
