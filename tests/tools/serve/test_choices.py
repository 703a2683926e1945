# SPDX-License-Identifier: Apache-2.0
"""One choice of an answer: pieces, endings and log-probabilities from the engine's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optimum_neuron.core import FinishReason
from optimum_neuron.engine.events import TokenEvent
from optimum_neuron.tools.serve.choice import AnswerChoice, Piece


WORDS = ["one", " two", " th", "ree", " four", ""]


class Words:
    """A tokenizer of a few words."""

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return "".join(WORDS[token] for token in ids)


def choice(*stops: str, logprobs: int | None = None, stop_token_ids: frozenset[int] = frozenset()) -> AnswerChoice:
    return AnswerChoice(Words(), stops, stop_token_ids, logprobs)


def take(made: AnswerChoice, *tokens: int, ends: FinishReason | None = None) -> list[Piece]:
    """Hands tokens over until the choice has ended; `ends` is what the engine says with the last one."""
    pieces = []
    for number, token in enumerate(tokens, 1):
        reason = ends if number == len(tokens) else None
        pieces.append(made.take_token(TokenEvent("a", token, reason, -float(token), ((token, -1.0), (9, -2.0)))))
        if made.finish_reason is not None:
            break
    return pieces


def test_a_stop_string_over_three_tokens_gets_out_in_no_part() -> None:
    pieces = take(choice("three f"), 0, 1, 2, 3, 4)
    assert [piece.text for piece in pieces] == ["one", " two", " ", "", ""]
    assert pieces[-1].finish_reason == "stop" and pieces[-1].stop_reason == "three f"


def test_what_only_begins_like_a_stop_string_gets_out_in_the_end() -> None:
    pieces = take(choice("three!"), 0, 1, 2, 3, ends="length")
    assert [piece.text for piece in pieces] == ["one", " two", " ", "three"]
    assert pieces[-1].finish_reason == "length" and pieces[-1].stop_reason is None


def test_an_end_token_has_no_text_and_a_clients_own_is_named() -> None:
    for ids, reason in ((frozenset(), None), (frozenset({4}), 4)):
        pieces = take(choice(stop_token_ids=ids), 0, 1, 4, ends="stop")
        assert "".join(piece.text for piece in pieces) == "one two"
        assert pieces[-1].finish_reason == "stop" and pieces[-1].stop_reason == reason


def test_log_probabilities_come_with_their_text_and_none_of_a_stop_string() -> None:
    pieces = take(choice("three", logprobs=1), 0, 1, 2, 4, 2, 3)
    told = [[(token.token_id, token.start) for token in piece.scored] for piece in pieces]
    assert told == [[(0, 0)], [(1, 3)], [], [(2, 7), (4, 10)], [], [(2, 15)]]  # its space came out
    assert pieces[0].scored[0].top == ((0, -1.0),) and pieces[1].scored[0].logprob == -1.0


def test_tokens_without_text_are_told_with_the_next_text_or_at_the_end() -> None:
    pieces = take(choice(logprobs=0), 5, 0, 5, ends="length")
    assert [[token.token_id for token in piece.scored] for piece in pieces] == [[], [5, 0], [5]]
    assert pieces[0].is_empty and all(token.top == () for piece in pieces for token in piece.scored)
