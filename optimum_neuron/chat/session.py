# SPDX-License-Identifier: Apache-2.0
"""A conversation whose history stays in a slot: a turn computes what is new in it. Knows no terminal."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import GenerationConfig

from ..continuous_batching.requests import RequestFactory
from ..engine.request import FinishReason, Request
from ..engine.service import EngineService
from ..engine.stream import TokenStream
from ..errors import first_line
from ..modeling import NeuronModelForCausalLM
from ..runtime.lengths import most_new_tokens
from ..serve.detokenizer import Detokenizer
from ..serve.stop_strings import StopStrings
from .messages import Message, check_messages
from .settings import DEFAULT_NEW_TOKENS, Settings


@dataclass(frozen=True)
class Turn:
    """What an answer took.

    Attributes:
        text: the answer, or what there is of one that was interrupted.
        computed, reused: tokens of the conversation that were computed for it, and those that the slot had already.
        generated: tokens of the answer, its end token included.
        ttft_seconds: until the first of them; None where none came.
        decode_seconds: from the first to the last.
        room: tokens that the slot still holds.
        ending: why it ended: an end token, its length, or who reads it.
    """

    text: str
    computed: int
    reused: int
    generated: int
    ttft_seconds: float | None
    decode_seconds: float
    room: int
    ending: FinishReason | None

    @property
    def tokens_per_second(self) -> float | None:
        """Of the tokens after the first; None where there are none."""
        return (self.generated - 1) / self.decode_seconds if self.generated > 1 and self.decode_seconds else None


@dataclass
class Totals:
    """Sums over all turns."""

    turns: int = 0
    computed: int = 0
    reused: int = 0
    generated: int = 0

    def add(self, turn: Turn) -> None:
        self.turns += 1
        self.computed += turn.computed
        self.reused += turn.reused
        self.generated += turn.generated


class ChatSession:
    """Messages, and a service whose slots keep what was computed of them.

    A turn renders the whole conversation by the chat template and asks the engine for what follows. The engine finds the longest
    prefix of it that a slot holds, so a turn computes from the first token on that differs; where slots keep state that cannot be cut,
    from the last snapshot before it.

    Args:
        model: loaded, and served by `service` alone.
        tokenizer: with a chat template.
        system: the first message.

    Raises:
        ValueError: the tokenizer has no chat template, or the settings ask for what the artifact cannot do.

    Attributes:
        messages: the conversation; an answer that was interrupted is in it as far as it came.
        settings: of the next answer.
        totals: of all turns.
    """

    def __init__(
        self,
        model: NeuronModelForCausalLM,
        service: EngineService,
        tokenizer: Any,
        settings: Settings | None = None,
        system: str | None = None,
    ) -> None:
        check_template(tokenizer)
        self.messages: list[Message] = []
        self.totals = Totals()
        self._model = model
        self._service = service
        self._tokenizer = tokenizer
        self._numbers = itertools.count()
        self._stream: TokenStream | None = None
        self._interrupted = False
        self.settings = Settings()
        self.change_settings(settings or Settings())
        if system is not None:
            self.set_system(system)

    def change_settings(self, settings: Settings) -> None:
        """Has the next answers follow other settings; a seed begins its numbers again.

        Raises:
            ValueError: the artifact cannot choose tokens so. Nothing is changed.
        """
        self._factory = RequestFactory(self._model, GenerationConfig(**settings.keywords()), None, cuts_text=True)
        self._seeds = None if settings.seed is None else np.random.SeedSequence(settings.seed)
        self.settings = settings

    @property
    def is_greedy(self) -> bool:
        """Whether an answer is always the same."""
        return not self._factory.config.do_sample

    @property
    def kept(self) -> str:
        """How the history is kept, in words."""
        kept = self._model.runner.kept
        if not kept.needed:
            return "the history stays in the slot: a turn computes what is new"
        if kept.places:
            return "this model's state cannot be cut: a turn goes on from the last of its snapshots, behind an earlier message of yours"
        return (
            "this model's state cannot be cut, and the artifact has no snapshots of it: each turn computes the whole conversation; "
            "export with --state-snapshots"
        )

    @property
    def system(self) -> str | None:
        """The system message."""
        first = self.messages[:1]
        return first[0]["content"] if first and first[0]["role"] == "system" else None

    def set_system(self, text: str | None) -> None:
        """Sets the system message, or takes it away."""
        others = self.messages[self.system is not None :]
        self.messages = others if text is None else [_message("system", text), *others]

    def clear(self) -> None:
        """Forgets all messages but the system's. The slot keeps what it holds, for who says the same again."""
        self.messages = self.messages[: self.system is not None]

    def undo(self) -> str:
        """Takes the last message of the user back, with its answer, and returns it.

        Raises:
            ValueError: there is none.
        """
        place = self._last_question()
        question = self.messages[place]["content"]
        self.messages = self.messages[:place]
        return question

    def replace(self, messages: Sequence[Message]) -> None:
        """Goes on with another conversation.

        Raises:
            ValueError: it is none. Nothing is changed.
        """
        check_messages(messages)
        self.messages = list(messages)

    def send(self, text: str, show: Callable[[str], None]) -> Turn:
        """Answers a message; one that is not answered at all is not kept.

        Args:
            show: gets the answer's text, piece by piece.

        Raises:
            ValueError: the message does not fit the slot beside those before it, or the chat template refuses it.
            RuntimeError: it could not be computed. In both cases the conversation is as before.
        """
        return self._answer([*self.messages, _message("user", text)], show)

    def retry(self, show: Callable[[str], None]) -> Turn:
        """Answers the last message of the user again; see `send`.

        Raises:
            ValueError: there is none.
        """
        return self._answer(self.messages[: self._last_question() + 1], show)

    def interrupt(self) -> None:
        """Ends the answer that is under way, from a signal's handler; what there is of it stays."""
        self._interrupted = True
        if self._stream is not None:
            self._stream.abort()

    def _last_question(self) -> int:
        for place in reversed(range(len(self.messages))):
            if self.messages[place]["role"] == "user":
                return place
        raise ValueError("there is no message of yours yet")

    def _answer(self, messages: list[Message], show: Callable[[str], None]) -> Turn:
        request = self._request(self._render(messages))
        statistics, self._interrupted = self._service.engine.statistics, False
        before = statistics.prompt_tokens, statistics.prefix_hit_tokens
        detokenizer, stops = Detokenizer(self._tokenizer), StopStrings(self._factory.stop_strings)
        pieces, times = [""], []
        start = time.perf_counter()
        try:
            with self._service.submit(request) as self._stream:
                if self._interrupted:
                    self._stream.abort()
                for token in self._stream:
                    times.append(time.perf_counter())
                    if self._stream.finish_reason != "stop":
                        pieces.append(stops.push(detokenizer.push(token)))
                        show(pieces[-1])
                    if stops.found is not None:
                        break
                ending = self._stream.finish_reason if stops.found is None else "stop"
        finally:
            self._stream = None
        if stops.found is None:
            pieces.append(stops.push(detokenizer.finish()))
            pieces[-1] += stops.finish() if stops.found is None else ""
            show(pieces[-1])
        if times:
            self.messages = [*messages, _message("assistant", "".join(pieces))]
        turn = Turn(
            text="".join(pieces),
            computed=statistics.prompt_tokens - before[0],
            reused=statistics.prefix_hit_tokens - before[1],
            generated=len(times),
            ttft_seconds=times[0] - start if times else None,
            decode_seconds=times[-1] - times[0] if times else 0.0,
            room=self._room(len(request.prompt_token_ids) + len(times)),
            ending=ending,
        )
        self.totals.add(turn)
        return turn

    def _room(self, tokens: int) -> int:
        return max(0, self._model.neuron_config.sequence_length - tokens)

    def _render(self, messages: Sequence[Message]) -> list[int]:
        try:
            ids: list[int] = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_dict=True
            )["input_ids"]
        except Exception as error:  # a template is a program
            raise ValueError(
                f"the chat template refuses these messages ({first_line(error)}); change their roles, by /system or /load, or begin "
                f"again by /clear"
            ) from error
        return ids

    def _request(self, ids: list[int]) -> Request:
        sizes = self._model.neuron_config
        room = most_new_tokens(len(ids), sizes)
        if room < 1:
            raise ValueError(
                f"the conversation has {len(ids):,} tokens with this message, and a slot holds sequence_length="
                f"{sizes.sequence_length:,}; take the last turn back by /undo or all by /clear, or export with a longer "
                f"--sequence-length"
            )
        longest = self.settings.max_new_tokens or self._factory.new_tokens(len(ids)) or DEFAULT_NEW_TOKENS
        request = self._factory.make(f"turn-{next(self._numbers)}", ids, min(room, longest))
        if self._seeds is None:
            return request
        return replace(request, seed=int(self._seeds.spawn(1)[0].generate_state(1)[0]))


def check_template(tokenizer: Any) -> None:
    """Raises ValueError where a tokenizer has no chat template."""
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{tokenizer.name_or_path} has no chat template, by which a conversation becomes one text; put a chat_template.jinja "
            f"beside its tokenizer.json before the export, or continue texts by `optimum-cli neuron generate --no-chat-template`"
        )


def _message(role: str, content: str) -> Message:
    message: Message = {"role": role, "content": content}
    check_messages([message])
    return message
