# SPDX-License-Identifier: Apache-2.0
"""Conversations in a slot: what a turn computes, what it answers, and what is left after one that fails."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from characters import character_tokenizer
from helpers import Artifacts
from transformers import PreTrainedTokenizerFast as Tokenizer

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.engine.service import EngineService
from optimum_neuron.tools.chat import loop
from optimum_neuron.tools.chat.session import ChatSession
from optimum_neuron.tools.chat.settings import Settings


FEW = Settings(max_new_tokens=4)


def ignore(piece: str) -> None:
    """Shows nothing."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return character_tokenizer()


@pytest.fixture(scope="module")
def model(cpu_artifact: Artifacts) -> NeuronModelForCausalLM:
    return NeuronModelForCausalLM.from_pretrained(cpu_artifact("llama"))


@contextmanager
def chatting(model: NeuronModelForCausalLM, tokenizer: Tokenizer, settings: Settings = FEW) -> Iterator[ChatSession]:
    with model.serve() as service:
        yield ChatSession(model, service, tokenizer, settings)


@pytest.fixture
def session(
    request: pytest.FixtureRequest, model: NeuronModelForCausalLM, tokenizer: Tokenizer
) -> Iterator[ChatSession]:
    with chatting(model, tokenizer, getattr(request, "param", FEW)) as session:
        yield session


def ids(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[int]:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


def fresh(model: NeuronModelForCausalLM, tokenizer: Tokenizer, prompt: list[int]) -> str:
    """Return what generate() answers to a conversation, with nothing in any slot."""
    sequences = model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)
    text: str = tokenizer.decode(sequences[0, len(prompt) :], skip_special_tokens=True)
    return text


def test_a_turn_computes_only_what_is_new_and_answers_as_a_fresh_generate(
    model: NeuronModelForCausalLM, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    step = model.runner.run_step

    def counted(chunks: Any = (), *rest: Any, **options: Any) -> Any:
        ran.append(sum(len(chunk.token_ids) for chunk in chunks))
        return step(chunks, *rest, **options)

    monkeypatch.setattr(model.runner, "run_step", counted)
    with chatting(model, tokenizer) as session:
        assert "only what is new" in session.kept
        first = session.send_message("ab", ignore)
        prompt = ids(tokenizer, session.messages[:1])
        assert (first.computed, first.reused, first.generated) == (len(prompt), 0, 4) == (sum(ran), 0, 4)
        ran.clear()
        second = session.send_message("cd", ignore)
        whole = ids(tokenizer, session.messages[:3])
        # The last token of an answer was chosen, and not fed back.
        known = len(prompt) + 3
        assert (second.computed, second.reused) == (len(whole) - known, known)
        assert sum(ran) == second.computed
        assert second.room == 64 - len(whole) - 4
    assert [fresh(model, tokenizer, tokens) for tokens in (prompt, whole)] == [first.text, second.text]
    assert session.messages[3] == {"role": "assistant", "content": second.text}


def test_a_model_with_state_continues_from_its_last_copy(
    cpu_artifact: Artifacts, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = NeuronModelForCausalLM.from_pretrained(cpu_artifact("lfm2"))
    with chatting(model, tokenizer) as session:
        assert "follows the last copy" in session.kept
        prompt = session.send_message("ab", ignore).computed
        second = session.send_message("cd", ignore)
        whole = ids(tokenizer, session.messages[:3])
        monkeypatch.setattr(model.runner, "kept", SimpleNamespace(needed=True, lengths=()))
        assert "each turn computes the whole" in session.kept
        monkeypatch.undo()
    assert (second.reused, second.computed) == (prompt, len(whole) - prompt)
    assert fresh(model, tokenizer, whole) == second.text


@pytest.mark.parametrize("session", [Settings(max_new_tokens=30)], indirect=True)
def test_what_there_is_of_an_interrupted_answer_stays(session: ChatSession, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, session)
    shown: list[str] = []

    def show(piece: str) -> None:
        shown.append(piece)
        if len(shown) == 2:
            session.interrupt_answer()

    turn = session.send_message("ab", show)
    assert turn.ending == "abort" and 2 <= turn.generated < 10
    assert session.messages[1:] == [{"role": "assistant", "content": turn.text}] and turn.text == "".join(shown)
    assert session.send_message("cd", ignore).reused >= 20 + turn.generated - 1


def slow(monkeypatch: pytest.MonkeyPatch, session: ChatSession) -> None:
    """Make steps that a test can interrupt."""
    engine, step = session._service.engine, session._service.engine.step
    monkeypatch.setattr(engine, "step", lambda: time.sleep(0.02) or step())


def test_a_message_without_an_answer_is_not_kept(session: ChatSession, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, session)
    submit = EngineService.submit

    def at_once(service: EngineService, request: Any) -> Any:
        stream = submit(service, request)
        session.interrupt_answer()  # before anybody knows the stream
        return stream

    monkeypatch.setattr(EngineService, "submit", at_once)
    turn = session.send_message("a prompt of more than one step", ignore)
    assert (turn.generated, turn.ending, turn.ttft_seconds, session.messages) == (0, "abort", None, [])
    monkeypatch.undo()
    assert session.send_message("ab", ignore).generated == 4, "the interrupt was of the turn before"


def test_a_conversation_that_does_not_fit_is_refused_with_both_numbers(session: ChatSession) -> None:
    before = list(session.messages)
    with pytest.raises(ValueError, match=r"has 98 tokens .* sequence_length=64; .* /clear, .* --sequence-length"):
        session.send_message("x" * 80, ignore)
    assert session.messages == before
    turn = session.send_message("x" * 44, ignore)  # 62 tokens: three more fit, of which the last is not fed back
    assert (turn.generated, turn.ending, turn.room) == (3, "length", 0)


def test_a_failure_leaves_the_conversation_as_it_was(session: ChatSession, monkeypatch: pytest.MonkeyPatch) -> None:
    session.send_message("ab", ignore)
    before = list(session.messages)

    def fail(piece: str) -> None:
        raise BrokenPipeError("the reader is gone")

    with pytest.raises(BrokenPipeError):
        session.send_message("cd", fail)
    with pytest.raises(ValueError, match="no UTF-8"):
        session.send_message("\udcff", ignore)
    monkeypatch.setattr(session._tokenizer, "chat_template", "{{ raise_exception('roles') }}")
    with pytest.raises(ValueError, match=r"template refuses these messages \(roles\)"):
        session.send_message("cd", ignore)
    monkeypatch.undo()
    assert session.messages == before
    assert session.send_message("cd", ignore).generated == 4


def test_a_seed_repeats_a_conversation(model: NeuronModelForCausalLM, tokenizer: Tokenizer) -> None:
    def answers(seed: int) -> list[str]:
        with chatting(model, tokenizer, Settings(max_new_tokens=6, temperature=5.0, seed=seed)) as session:
            return [session.send_message("ab", ignore).text for _ in range(2)]

    assert answers(1) == answers(1) != answers(2)


def test_settings_that_the_artifact_cannot_honour_and_a_missing_template_are_refused(
    model: NeuronModelForCausalLM, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.generation_config, "num_beams", 2)
    with pytest.raises(ValueError, match="num_beams"), chatting(model, tokenizer, Settings(temperature=1.0)):
        pass
    plain = SimpleNamespace(chat_template=None, name_or_path="smollm2")
    with pytest.raises(ValueError, match=r"smollm2 has no chat template.*--no-chat-template"):
        ChatSession(None, None, plain)  # type: ignore[arg-type]


@pytest.mark.parametrize("line", ["/hepl", "/help me"])
def test_a_wrong_line_ends_a_chat_from_a_pipe(
    line: str, session: ChatSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = session.messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{line}\na\n"))
    message = f'{line} is no command; /help lists them, and """ before and after it make it a message'
    with pytest.raises(ValueError, match=re.escape(message)):
        loop.run_chat(session, loop.Terminal())
    assert session.messages is said and len(said) == 2 and session.system is None
