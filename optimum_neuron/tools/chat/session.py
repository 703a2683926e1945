# SPDX-License-Identifier: Apache-2.0
"""A conversation with its history in the cache: a turn computes what is new in it. Knows no terminal."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...core import FinishReason, Request
from ...engine.service import EngineService
from ...errors import first_line
from ...runtime.lengths import most_new_tokens
from ...text.stream import TextAnswer
from .settings import DEFAULT_NEW_TOKENS, Settings


if TYPE_CHECKING:
    from ...generate.model import NeuronModelForCausalLM
    from ...generate.text_model import TextModel


@dataclass(frozen=True)
class Turn:
    """An answer, as far as it came, and its cost in tokens and seconds."""

    text: str
    computed: int  # for it, of the conversation
    reused: int  # of the conversation, in the cache already
    generated: int  # of the answer, its end token included
    ttft_seconds: float | None  # to its first token; None where none came
    decode_seconds: float  # from the first to the last
    room: int  # tokens that still fit the conversation
    ending: FinishReason | None

    def __str__(self) -> str:
        if self.ttft_seconds is None:
            return f"not answered, so your message is not kept; {self.computed:,} tokens of it were computed"
        later = self.generated - 1
        speed = f" at {later / self.decode_seconds:,.1f} tok/s" if later and self.decode_seconds else ""
        ending = {"abort": ", interrupted", "length": ", cut at --max-new-tokens"}
        if not self.room:
            ending["length"] = ", the conversation is full: /clear starts again"
        return (
            f"{self.computed:,} tokens computed, {self.reused:,} reused, TTFT {self.ttft_seconds * 1000:,.0f} ms, "
            f"{self.generated:,} new tokens{speed}, room for {self.room:,} more{ending.get(self.ending or '', '')}"
        )


class ChatSession:
    """Messages, and a service that keeps the computed history of them.

    A turn renders the whole conversation by the chat template. The engine reuses the longest prefix that its cache holds; for
    a model with recurrent state, up to the last copy of it. An interrupted answer is kept as far as it came.

    Raises ValueError where the tokenizer has no chat template, or the artifact cannot choose tokens as the settings ask.
    """

    def __init__(
        self,
        model: TextModel | NeuronModelForCausalLM,
        service: EngineService,
        tokenizer: Any,
        settings: Settings | None = None,
        system: str | None = None,
    ) -> None:
        check_template(tokenizer)
        self._model, self._service, self._tokenizer = model, service, tokenizer
        self._numbers = itertools.count()
        self._answer: TextAnswer | None = None
        self._interrupted = False
        self.system, self.settings = system, settings or Settings()
        self.messages: list[dict[str, str]] = []
        self._requests = model.make_requests(self.settings.generate_keywords())
        self._seeds = None if self.settings.seed is None else itertools.count(self.settings.seed)

    @property
    def kept(self) -> str:
        """A sentence about how much of the history a turn computes again."""
        kept = self._model.runner.kept
        if not kept.needed:
            return "each turn computes only what is new"
        if len(kept.lengths):
            return "each turn computes what follows the last copy that was kept of this model's state"
        return "each turn computes the whole conversation: export with --state-snapshots to keep this model's state"

    def send_message(self, text: str, show: Callable[[str], None]) -> Turn:
        """Answer a message, and show the text piece by piece. Raise ValueError or RuntimeError where it cannot be answered, and keep nothing."""
        self._interrupted = False
        messages = [*self.messages, {"role": "user", "content": text}]
        request = self._make_request(messages)
        statistics = self._service.engine.statistics
        before = statistics.prompt_tokens, statistics.prefix_hit_tokens
        start = time.perf_counter()
        stream = self._service.submit(request)
        answer = self._answer = TextAnswer(stream, self._tokenizer, self._requests.stop_strings)
        if self._interrupted:
            answer.abort()
        pieces = []
        for piece in answer:
            pieces.append(piece)
            show(piece)
        times, text = answer.times, "".join(pieces)
        if times:
            self.messages = [*messages, {"role": "assistant", "content": text}]
        return Turn(
            text=text,
            computed=statistics.prompt_tokens - before[0],
            reused=statistics.prefix_hit_tokens - before[1],
            generated=len(times),
            ttft_seconds=times[0] - start if times else None,
            decode_seconds=times[-1] - times[0] if times else 0.0,
            room=max(0, self._model.neuron_config.sequence_length - len(request.prompt_token_ids) - len(times)),
            ending=answer.ending,
        )

    def interrupt_answer(self) -> None:
        """End the present answer; the handler of a signal may call this."""
        self._interrupted = True
        if self._answer is not None:
            self._answer.abort()

    def _make_request(self, messages: Sequence[dict[str, str]]) -> Request:
        turns = list(messages) if self.system is None else [{"role": "system", "content": self.system}, *messages]
        try:
            "".join(each["content"] for each in turns).encode()  # no tokenizer takes bytes that are no UTF-8
            ids = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
        except UnicodeEncodeError:
            raise ValueError("the message has bytes that are no UTF-8; write it again") from None
        except Exception as error:  # a template is a program
            raise ValueError(
                f"the chat template refuses these messages ({first_line(error)}); change the system message by /system, or start "
                f"again by /clear"
            ) from error
        sizes = self._model.neuron_config
        room = most_new_tokens(len(ids), sizes)
        if room < 1:
            raise ValueError(
                f"the conversation has {len(ids):,} tokens with this message, and a slot holds sequence_length="
                f"{sizes.sequence_length:,}; start again by /clear, or export with a longer --sequence-length"
            )
        longest = self.settings.max_new_tokens or self._requests.new_tokens(len(ids)) or DEFAULT_NEW_TOKENS
        seed = None if self._seeds is None else next(self._seeds)
        return self._requests.make_request(f"turn-{next(self._numbers)}", ids, min(room, longest), seed=seed)


def check_template(tokenizer: Any) -> None:
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{tokenizer.name_or_path} has no chat template, which makes one text of a conversation; put a chat_template.jinja "
            f"next to its tokenizer.json before the export, or continue texts by `optimum-cli neuron generate --no-chat-template`"
        )
