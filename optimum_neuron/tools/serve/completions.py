# SPDX-License-Identifier: Apache-2.0
"""The route /v1/completions: its body, and the forms of its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .choice import Piece, ScoredToken
from .errors import ApiError
from .fields import Fields, check_text, check_token_id, shown_value
from .loaded_model import LoadedModel
from .protocol import LARGEST, MOST_TOP_LOGPROBS, Asked, Prompt, check_model, read_common
from .token_texts import TokenTexts, finite_logprob


# OpenAI's.
DEFAULT_TOKENS = 16


def read_completion(data: Mapping[str, Any], served: LoadedModel) -> Asked:
    """Read a completion's body; raise ApiError where it is wrong, or this server cannot do it."""
    fields = Fields(data)
    check_model(fields, served)
    prompts = _read_prompts(fields.take_any("prompt"), served)
    most = fields.take_whole("max_tokens", 1, LARGEST) or DEFAULT_TOKENS
    count = fields.take_whole("logprobs", 0, MOST_TOP_LOGPROBS)
    return read_common(
        fields, served, prompts=prompts, max_tokens=most, limit="max_tokens", logprobs=count, special_tokens=True
    )


def _read_prompts(value: Any, served: LoadedModel) -> Sequence[Prompt]:
    if isinstance(value, str):
        return [check_text("prompt", value)]
    if isinstance(value, list) and value:
        if all(isinstance(each, str) for each in value):
            return [check_text("prompt", each) for each in value]
        rows = value if all(isinstance(each, list) for each in value) else [value]
        if not any(isinstance(each, str | list) for row in rows for each in row):
            return [[check_token_id("prompt", each, served.num_embeddings) for each in row] for row in rows]
    raise ApiError(
        f"prompt is {shown_value(value)}; give a string, a list of strings, a list of token ids, or a list of such lists",
        param="prompt",
    )


class CompletionForm:
    """Answers to completions, in OpenAI's form."""

    prefix, whole_object, piece_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    def top_members(self, prompt: list[int]) -> dict[str, Any]:
        """Return members of an answer with token ids: none, as each choice has a prompt."""
        return {}

    def begin_choices(self, index: int) -> list[dict[str, Any]]:
        """Return choices of the events before the first piece: none."""
        return []

    def piece_choices(
        self, index: int, piece: Piece, logprobs: int | None, prompt: list[int] | None
    ) -> list[dict[str, Any]]:
        """Return choices of the events of a piece, one each."""
        return [self.whole_choice(index, piece, logprobs, prompt)]

    def whole_choice(self, index: int, piece: Piece, logprobs: int | None, prompt: list[int] | None) -> dict[str, Any]:
        """Return a choice that is sent at once."""
        choice = {
            "index": index,
            "text": piece.text,
            "logprobs": None if logprobs is None else self._logprobs_json(piece.scored),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if prompt is None:
            return choice
        return choice | {"token_ids": piece.token_ids, "prompt_token_ids": prompt if piece.is_first else None}

    def _logprobs_json(self, scored: tuple[ScoredToken, ...]) -> dict[str, Any]:
        names = [self._texts.token_text(each.token_id) for each in scored]
        return {
            "tokens": names,
            "token_logprobs": [finite_logprob(each.logprob) for each in scored],
            # The chosen token is always among them, as OpenAI has it.
            "top_logprobs": [
                {self._texts.token_text(token): finite_logprob(logprob) for token, logprob in each.top}
                | {name: finite_logprob(each.logprob)}
                for name, each in zip(names, scored, strict=True)
            ],
            "text_offset": [each.start for each in scored],
        }
