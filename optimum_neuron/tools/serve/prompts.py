# SPDX-License-Identifier: Apache-2.0
"""Texts and conversations become token ids in threads of their own: a long text holds up neither answers nor short texts."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, TypeVar

from ...config import NeuronConfig
from ...errors import first_line
from ...runtime.lengths import most_new_tokens
from .fields import shown_value
from .http import ApiError
from .protocol import Asked, Conversation


T = TypeVar("T")


class _Lane:
    """A thread that works in order, with a tokenizer of its own: one of transformers that works on a text refuses other threads."""

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._shared = tokenizer
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=f"optimum-neuron-{name}")

    async def run_work(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.thread, work)

    @cached_property
    def tokenizer(self) -> Any:
        """The lane's own tokenizer, which takes memory from the first use on."""
        return copy.deepcopy(self._shared)


class PromptEncoder:
    """The encoder of one server's prompts: short ones in one thread and long ones in another, each in the order of arrival."""

    def __init__(self, tokenizer: Any, config: NeuronConfig) -> None:
        self._short, self._long = _Lane(tokenizer, "texts"), _Lane(tokenizer, "long-texts")
        _ = self._short.tokenizer  # before the first request
        self._config, self._length = config, config.sequence_length
        # No text with more characters has few enough tokens, whatever they are.
        self._most = self._length * max(map(len, tokenizer.get_vocab()), default=1)
        # Values that the server gives to a template itself.
        given = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = {"self", "messages", "chat_template", *given, *tokenizer.special_tokens_map}

    async def run_long(self, work: Callable[[], T]) -> T:
        return await self._long.run_work(work)

    async def encode_prompts(self, asked: Asked, *, is_long: bool) -> list[Sequence[int]]:
        """Return the token ids of each prompt; nothing short waits for what may take long. Raise ApiError where one cannot be served."""
        prompts: list[Sequence[int]] = []
        lane = self._long if is_long else self._short
        for prompt in asked.prompts:
            if isinstance(prompt, list):
                ids: Sequence[int] = prompt
            else:
                self._check_text(prompt)
                ids = await lane.run_work(partial(self._tokenize_prompt, prompt, lane, asked.special_tokens))
            self._check_room(len(ids), asked)
            prompts.append(ids)
        return prompts

    def close(self) -> None:
        for lane in (self._short, self._long):
            lane.thread.shutdown(cancel_futures=True)

    def _check_text(self, prompt: str | Conversation) -> None:
        if isinstance(prompt, str):
            self._check_size(len(prompt))
            return
        self._check_size(prompt.characters)
        if len(prompt.messages) > self._length:
            raise self._length_error(f"{len(prompt.messages):,} messages")
        for name in self._reserved.intersection(prompt.options):
            raise ApiError(
                f"chat_template_kwargs has {shown_value(name)}, which the server sets; leave it out",
                param="chat_template_kwargs",
            )

    def _tokenize_prompt(self, prompt: str | Conversation, lane: _Lane, special: bool) -> Sequence[int]:
        tokenizer = lane.tokenizer
        if isinstance(prompt, str):
            ids: list[int] = tokenizer(prompt, add_special_tokens=special)["input_ids"]
            return ids
        if tokenizer.chat_template is None:
            raise ApiError("this model has no chat template; send a prompt to /v1/completions", param="messages")
        try:
            text: str = tokenizer.apply_chat_template(
                prompt.messages,
                tokenize=False,
                add_generation_prompt=prompt.begins_answer,
                continue_final_message=prompt.continues_last,
                **prompt.options,
            )
            self._check_size(len(text))
            ids = tokenizer(text, add_special_tokens=special)["input_ids"]
        except ApiError:
            raise
        except Exception as error:  # a template is a program
            raise ApiError(
                f"the model's chat template refuses these messages ({first_line(error)}); change their roles or their order",
                param="messages",
            ) from error
        return ids

    def _check_size(self, characters: int) -> None:
        if characters > self._most:
            raise self._length_error(f"{characters:,} characters, which no {self._length} tokens have")

    def _check_room(self, tokens: int, asked: Asked) -> None:
        most = most_new_tokens(tokens, self._config)
        if not tokens:
            raise ApiError("the prompt has 0 tokens, but needs at least 1; give some text", param="prompt")
        if most < 1:
            raise self._length_error(f"{tokens:,} tokens")
        if asked.max_tokens is not None and asked.max_tokens > most:
            raise ApiError(
                f"the prompt of {tokens:,} tokens and {asked.limit}={asked.max_tokens:,} do not fit the model's length of "
                f"{self._length:,} tokens; lower {asked.limit} to {most:,}, or shorten the prompt",
                param=asked.limit,
                code="context_length_exceeded",
            )

    def _length_error(self, size: str) -> ApiError:
        return ApiError(
            f"the prompt has {size}, and the model's length is {self._length:,} tokens; shorten it, or export "
            f"the model with a larger --sequence-length",
            param="prompt",
            code="context_length_exceeded",
        )
