# SPDX-License-Identifier: Apache-2.0
"""/v1/chat/completions as OpenAI's client sees it, at once and streamed."""

from __future__ import annotations

import copy
from typing import Any

from served_app import CHAT, NAME, App, Start

from optimum_neuron.step.spec import SamplingParams


def ask(app: App, **options: Any) -> Any:
    return app.create("chat", **{"messages": CHAT, "max_tokens": 12} | options)


def prompt_of(app: App) -> list[int]:
    ids: list[int] = app.served.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    return ids


def test_a_chat_is_the_template_and_what_the_engine_makes_of_it(app: App) -> None:
    prompt = prompt_of(app)
    expected = app.tokens(prompt, 12)
    answer = ask(app)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content == app.read(expected)
    assert choice.finish_reason == "length" and choice.index == 0 and choice.logprobs is None
    assert answer.object == "chat.completion" and answer.model == NAME and answer.id.startswith("chatcmpl-")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 12)
    assert answer.usage.total_tokens == len(prompt) + 12


def test_a_stream_says_who_speaks_then_pieces_then_why_it_ends_then_the_counts(app: App) -> None:
    whole = ask(app)
    events = ask(app, stream=True, stream_options={"include_usage": True})
    first, *pieces, last, counts = events
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content == ""
    assert all(event.choices[0].delta.role is None and event.choices[0].finish_reason is None for event in pieces)
    text = "".join(event.choices[0].delta.content for event in pieces)
    assert text == whole.choices[0].message.content and len(pieces) > 5
    assert last.choices[0].finish_reason == "length" and last.choices[0].delta.content is None
    assert counts.choices == [] and counts.usage == whole.usage
    assert all(event.usage is None for event in events[:-1])
    assert not any("usage" in event.model_fields_set for event in ask(app, stream=True, max_tokens=2))
    assert {event.object for event in events} == {"chat.completion.chunk"}
    assert len({event.id for event in events}) == 1


def test_several_choices_are_told_apart_and_a_seed_brings_them_again(app: App) -> None:
    options = {"temperature": 1.5, "n": 3, "seed": 7, "max_tokens": 6}
    first, again = ask(app, **options), ask(app, **options)
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices] and len(set(texts)) == 3
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert first.usage.completion_tokens == 18 and first.usage.prompt_tokens == len(prompt_of(app))
    # The second choice has the next seed, and the engine's own draws.
    assert ask(app, **options | {"n": 1, "seed": 8}).choices[0].message.content == texts[1]
    sampled = app.tokens(prompt_of(app), 6, sampling=SamplingParams(temperature=1.5), seed=9)
    assert app.read(sampled) == texts[2]
    streamed = ["", "", ""]
    for event in ask(app, stream=True, **options):
        for choice in event.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_a_stop_token_ends_a_chat_and_the_models_own_may_be_ignored(start: Start) -> None:
    app = start()
    expected = app.tokens(prompt_of(app), 12)
    stop = next(token for token in expected[2:] if token not in expected[:2])
    place = expected.index(stop)
    answer = ask(app, extra_body={"stop_token_ids": [stop]})
    assert answer.choices[0].message.content == app.read(expected[:place])
    assert answer.choices[0].stop_reason == stop and answer.usage.completion_tokens == place + 1
    app.close()
    app = start(eos=frozenset({stop}))
    answer = ask(app)
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].stop_reason is None
    assert answer.choices[0].message.content == app.read(expected[:place])
    assert ask(app, extra_body={"ignore_eos": True}).usage.completion_tokens == 12
    usage = app.chat(ignore_eos=True).json()["usage"]  # without a limit
    assert usage["total_tokens"] == app.served.config.sequence_length + 1  # the last one needs no row


def test_log_probabilities_of_a_chat_are_told_token_by_token(app: App) -> None:
    answer = ask(app, logprobs=True, top_logprobs=2, max_tokens=6)
    tokens = app.tokens(prompt_of(app), 6)
    content = answer.choices[0].logprobs.content
    assert [each.token for each in content] == [app.served.tokenizer.decode([token]) for token in tokens]
    assert all(len(each.bytes) == 1 for each in content), "the tokenizer has one token for each byte"
    made = b"".join(bytes(each.bytes) for each in content)
    assert made.decode(errors="replace") == answer.choices[0].message.content
    for each in content:
        assert each.logprob == each.top_logprobs[0].logprob and each.token == each.top_logprobs[0].token
        assert len(each.top_logprobs) == 2 and each.top_logprobs[0].logprob >= each.top_logprobs[1].logprob
    events = ask(app, stream=True, logprobs=True, top_logprobs=2, max_tokens=6)
    told = [each for event in events if event.choices[0].logprobs for each in event.choices[0].logprobs.content]
    assert told == content


def test_a_chat_template_that_fails_or_is_not_there_is_told_and_harms_nobody(start: Start, tokenizer: Any) -> None:
    cases = {"{{ raise_exception('no such role') }}": "no such role", "{% for %}": "Expected", None: "/v1/completions"}
    for template, words in cases.items():
        broken = copy.deepcopy(tokenizer)
        broken.chat_template = template
        app = start(tokenizer=broken)
        answer = app.chat(max_tokens=2)
        error = answer.json()["error"]
        assert answer.status_code == 400 and words in error["message"] and error["param"] == "messages"
        assert app.complete(max_tokens=2).status_code == 200
        app.close()
