# SPDX-License-Identifier: Apache-2.0
"""Text from tokens while they come: whole characters only, all of the tokenizer's text, no part of a stop string; pieces of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest.mock import Mock

import pytest
from characters import WORDS, byte_level
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from optimum_neuron.core import FinishReason
from optimum_neuron.engine.events import TokenEvent
from optimum_neuron.text.stream import UNREADABLE, Detokenizer, StopStrings, TokenTexts
from optimum_neuron.tools.serve.answer import AnswerChoice, Piece


TEXTS = st.one_of(st.sampled_from(WORDS), st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
KINDS = ("bytes", "merged bytes", "byte fallback")


@cache
def tokenizer_of(kind: str) -> Any:
    """As GPT-2's: a token per byte, or merges that end within characters; as Llama's: pieces, and bytes for what has none."""
    if kind != "byte fallback":
        model = byte_level(320 if kind == "merged bytes" else 0, "<pad>", "<s>", "</s>")
        return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghij", "本", "é"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    model = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=model)


def pieces_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push_token(token) for token in ids), detokenizer.take_rest()]


def read(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


@pytest.mark.parametrize("kind", KINDS)
@examples(120)
@given(text=TEXTS)
def test_pieces_are_whole_characters_and_add_up_to_the_text(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == read(tokenizer, ids)
    if UNREADABLE not in text:
        assert not any(UNREADABLE in piece for piece in pieces)


@pytest.mark.parametrize("kind", KINDS[:2])
@examples(120)
@given(data=st.lists(st.one_of(st.binary(max_size=9), TEXTS.map(str.encode)), max_size=6))
def test_bytes_that_make_no_characters_add_up_to_what_the_tokenizer_reads(kind: str, data: list[bytes]) -> None:
    tokenizer = tokenizer_of(kind)
    names = pre_tokenizers.ByteLevel.alphabet()
    assert len(names) == 256
    texts, tokens = TokenTexts(tokenizer), tokenizer.convert_tokens_to_ids(sorted(names))
    by_byte = {texts.token_bytes(token)[0]: token for token in tokens}  # type: ignore[index]
    ids = [by_byte[byte] for byte in b"".join(data)]
    assert "".join(pieces_of(tokenizer, ids)) == read(tokenizer, ids)


def test_a_character_comes_with_its_last_byte_and_a_letter_at_once() -> None:
    tokenizer = tokenizer_of("bytes")
    assert pieces_of(tokenizer, tokenizer("a€b")["input_ids"]) == ["a", "", "", "€", "b", ""]
    tokenizer = tokenizer_of("byte fallback")
    assert pieces_of(tokenizer, tokenizer("a€b")["input_ids"]) == ["", "a", "", "", "€", "b", ""]


def test_unreadable_bytes_hold_up_nothing_for_long_and_few_tokens_are_read_again() -> None:
    tokenizer = tokenizer_of("bytes")
    broken = tokenizer.convert_tokens_to_ids("ÿ")  # the byte 0xff
    counting = Mock(wraps=tokenizer)
    detokenizer, out = Detokenizer(counting), 0
    for count in range(1, 200):
        out += len(detokenizer.push_token(broken))
        assert count - out <= 3
    assert out + len(detokenizer.take_rest()) == 199
    assert max(len(call.args[0]) for call in counting.decode.call_args_list) < 20


def test_special_tokens_and_ids_without_a_token_have_no_text() -> None:
    tokenizer = tokenizer_of("bytes")
    a, b = tokenizer("ab")["input_ids"]
    assert pieces_of(tokenizer, [1, a, 2, 299, 0, b, 2]) == ["", "a", "", "", "", "b", "", ""]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_single_tokens_make_the_text(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    texts = TokenTexts(tokenizer)
    ids = tokenizer("ab東é👧", add_special_tokens=False)["input_ids"]
    made = b"".join(bytes(texts.token_bytes(token) or ()) for token in ids)
    assert made.decode().strip() == "ab東é👧"


# Few letters, so that stop strings begin, break off and begin again.
LETTERS = st.text("ab", max_size=12)


@examples(400)
@given(pieces=st.lists(LETTERS, max_size=8), stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_a_text_gets_out_up_to_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    scanner, out, text = StopStrings(stops), "", ""
    for piece in pieces:
        out += scanner.push_text(piece)
        text += piece
        places = [text.find(stop) for stop in stops if stop in text]
        if places:
            assert scanner.found is not None and text.find(scanner.found) == min(places)
            assert out == text[: min(places)]
            return
        assert scanner.found is None
        held = text[len(out) :]
        assert out + held == text
        assert all(not stop.startswith(text[start:]) for stop in stops for start in range(len(out)))
        assert not held or any(stop.startswith(held) for stop in stops)
    assert out + scanner.push_text("", is_last=True) == text


TEXT_OF = ["one", " two", " th", "ree", " four", ""]


class Words:
    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return "".join(TEXT_OF[token] for token in ids)


def choice(*stops: str, logprobs: int | None = None, stop_token_ids: frozenset[int] = frozenset()) -> AnswerChoice:
    return AnswerChoice(Words(), stops, stop_token_ids, logprobs)


def take(made: AnswerChoice, *tokens: int, ends: FinishReason | None = None) -> list[Piece]:
    """Hands tokens over until the choice has ended; `ends` is what the engine says with the last one."""
    pieces = []
    for number, token in enumerate(tokens, 1):
        reason = ends if number == len(tokens) else None
        pieces.append(made.take_token(TokenEvent("a", token, reason, -float(token), ((token, -1.0), (9, -2.0)))))
        if pieces[-1].finish_reason is not None:
            break
    return pieces


def test_an_end_has_no_text_and_a_stop_string_or_a_clients_own_token_is_named() -> None:
    (*_, last) = take(choice("three f"), 0, 1, 2, 3, 4)
    assert (last.text, last.finish_reason, last.stop_reason) == ("", "stop", "three f")
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
