# SPDX-License-Identifier: Apache-2.0
"""From texts and conversations to token ids, in a thread of its own: a long text holds up no answer."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..config import NeuronConfig
from ..errors import first_line
from ..runtime.lengths import most_new_tokens
from .errors import ApiError
from .protocol import Asked, Conversation, Prompt


class PromptEncoder:
    """Encodes the prompts of one server, one after the other."""

    def __init__(self, tokenizer: Any, config: NeuronConfig) -> None:
        # One of its own: a tokenizer that is set up for a text refuses what other threads ask meanwhile.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._config = config
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="optimum-neuron-tokenizer")
        self._longest = max(map(len, tokenizer.get_vocab()), default=1)

    async def encode(self, asked: Asked) -> list[Sequence[int]]:
        """The token ids of each prompt.

        Raises:
            ApiError: a prompt is empty, does not fit beside the new tokens, or its chat template fails.
        """
        loop = asyncio.get_running_loop()
        prompts = []
        for prompt in asked.prompts:
            ids = await loop.run_in_executor(self._thread, self._ids, prompt)
            self._check(len(ids), asked)
            prompts.append(ids)
        return prompts

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _ids(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, list):
            return prompt
        if isinstance(prompt, Conversation):
            return self._render(prompt)
        most = self._config.sequence_length * self._longest
        if len(prompt) > most:  # whatever its tokens are: no need to find them
            raise self._too_long(f"{len(prompt):,} characters, which no {self._config.sequence_length} tokens have")
        ids: list[int] = self._tokenizer(prompt)["input_ids"]
        return ids

    def _render(self, conversation: Conversation) -> Sequence[int]:
        if self._tokenizer.chat_template is None:
            raise ApiError("this model has no chat template; send a prompt to /v1/completions", param="messages")
        try:
            text: str = self._tokenizer.apply_chat_template(
                conversation.messages, tokenize=False, add_generation_prompt=True
            )
            ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as error:  # a template is a program
            raise ApiError(
                f"the model's chat template refuses these messages ({first_line(error)}); change their roles or their order",
                param="messages",
            ) from error
        return ids

    def _check(self, tokens: int, asked: Asked) -> None:
        length, most = self._config.sequence_length, most_new_tokens(tokens, self._config)
        if not tokens:
            raise ApiError("the prompt has 0 tokens, but needs at least 1; give some text", param="prompt")
        if most < 1:
            raise self._too_long(f"{tokens:,} tokens")
        if asked.max_tokens is not None and asked.max_tokens > most:
            raise ApiError(
                f"the prompt of {tokens:,} tokens and {asked.limit}={asked.max_tokens:,} do not fit the model's length of "
                f"{length:,} tokens; lower {asked.limit} to {most:,}, or shorten the prompt",
                param=asked.limit,
                code="context_length_exceeded",
            )

    def _too_long(self, size: str) -> ApiError:
        return ApiError(
            f"the prompt has {size}, and the model's length is {self._config.sequence_length:,} tokens; shorten it, or export "
            f"the model with a larger --sequence-length",
            param="prompt",
            code="context_length_exceeded",
        )
