# SPDX-License-Identifier: Apache-2.0
"""Which requests can be served at all. Knows nothing of other requests; imports no torch."""

from __future__ import annotations

from ..config import NeuronConfig
from .request import Request


def check_request(request: Request, config: NeuronConfig, *, largest_step: int, decodes_beside: int) -> int:
    """How many tokens a request gets at most, where it can be served.

    Args:
        largest_step: tokens of a step, decodes and prompt tokens together.
        decodes_beside: most decodes that a step may hold beside a prompt.

    Raises:
        ValueError: no step or no slot could ever hold the request.
    """
    who, length = f"request {request.request_id!r}", config.sequence_length
    prompt, limit = len(request.prompt_token_ids), request.max_new_tokens
    if not prompt:
        raise ValueError(f"{who} has 0 prompt tokens, but needs at least 1; start its prompt with a begin token")
    if limit is not None and limit < 1:
        raise ValueError(f"{who} has max_new_tokens={limit}, but must get at least 1; raise it or leave it out")
    # The last generated token is returned and never fed back: it needs no cache row.
    most = length - prompt + 1
    if most < (limit or 1):
        wanted = "" if limit is None else f" and max_new_tokens={limit}"
        raise ValueError(
            f"{who} with {prompt} prompt tokens{wanted} exceeds sequence_length={length}, which must hold the prompt and "
            f"all but the last new token; shorten the prompt, ask for fewer tokens, or export with a larger sequence_length"
        )
    if request.atomic:
        _check_atomic(who, prompt, config, largest_step - decodes_beside)
    return most if limit is None else limit


def _check_atomic(who: str, prompt: int, config: NeuronConfig, budget: int) -> None:
    rows, chunk = config.ctx_batch_size, config.prefill_chunk_size
    if prompt > rows * chunk:
        raise ValueError(
            f"{who} is atomic with {prompt} prompt tokens, but one step takes in at most ctx_batch_size * "
            f"prefill_chunk_size = {rows} * {chunk} = {rows * chunk}; export with a larger prefill_chunk_size"
        )
    if prompt > budget:
        raise ValueError(
            f"{who} is atomic with {prompt} prompt tokens, but max_step_tokens leaves {budget} for prompts while the other "
            f"slots decode; raise max_step_tokens by {prompt - budget}"
        )
