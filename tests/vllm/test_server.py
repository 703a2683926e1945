# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` on a tiny artifact, asked by the `openai` client: answers, formats, counts and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from otlp_collector import read_attributes
from serving import Server, SharedServer, wait_for
from transformers import AutoModelForCausalLM, AutoTokenizer


LENGTH, SLOTS = 512, 4
PROMPTS = (
    "Hi",
    "The capital of France is",
    "Once upon a time, in a land far away, there was a lighthouse keeper who " * 20,
    "def factorial(n):\n    ",
    "1 2 3 4 5 6 7 8 9 10 " * 5,
)
CHAT = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time", "strict": True, "parameters": WEATHER}},
]
# Beyond the parameters that the `openai` client knows.
TOKENS = {"return_token_ids": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def tokenizer(text_checkpoint: Path) -> Any:
    return AutoTokenizer.from_pretrained(text_checkpoint)


def complete(server: Server, prompt: Any, new_tokens: int, **options: Any) -> Any:
    """A greedy completion, unless the options say otherwise."""
    extra = TOKENS | options.pop("extra_body", {})
    options = {"temperature": 0} | options
    return server.client.completions.create(
        model=server.model, prompt=prompt, max_tokens=new_tokens, extra_body=extra, **options
    )


def chat(server: Server, **options: Any) -> Any:
    return server.client.chat.completions.create(
        model=server.model, messages=CHAT, **{"temperature": 0, "max_tokens": 120} | options
    )


def refusal(server: Server, **options: Any) -> str:
    """The server's words where it takes a request for a faulty one."""
    with pytest.raises(openai.BadRequestError) as caught:
        complete(server, **{"prompt": "Hi", "new_tokens": 4} | options)
    return caught.value.message


def test_the_model_is_listed_with_the_compiled_length(text_server: Server) -> None:
    (model,) = text_server.client.models.list()
    assert model.id == text_server.model
    assert model.max_model_len == LENGTH


def test_prompts_of_all_lengths_at_once_get_what_generate_gives_each(
    text_server: Server, tokenizer: Any, greedy: Callable[..., list[int]]
) -> None:
    answer = complete(text_server, list(PROMPTS), 20)
    for prompt, choice in zip(PROMPTS, answer.choices, strict=True):
        ids = tokenizer(prompt).input_ids
        assert choice.prompt_token_ids == ids
        assert choice.token_ids == greedy(ids, 20)
        assert choice.text == tokenizer.decode(choice.token_ids)
        assert choice.finish_reason == "length"


def test_streamed_pieces_add_up_to_the_text_sent_at_once(text_server: Server) -> None:
    whole = complete(text_server, PROMPTS[1], 24)
    pieces = list(complete(text_server, PROMPTS[1], 24, stream=True, stream_options={"include_usage": True}))
    texts = [choice.text for piece in pieces for choice in piece.choices]
    assert len(texts) > 12
    assert "".join(texts) == whole.choices[0].text
    assert pieces[-1].usage.completion_tokens == 24
    assert [choice.finish_reason for piece in pieces for choice in piece.choices][-1] == "length"


def test_a_chat_is_the_template_and_greedy_generation(
    text_server: Server, tokenizer: Any, greedy: Callable[..., list[int]]
) -> None:
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    expected = greedy(ids, 16)
    answer = chat(text_server, max_tokens=16, extra_body=TOKENS)
    assert answer.prompt_token_ids == ids
    assert answer.choices[0].token_ids == expected
    assert answer.choices[0].message.content == tokenizer.decode(expected)
    deltas = [piece.choices[0].delta.content or "" for piece in chat(text_server, max_tokens=16, stream=True)]
    assert "".join(deltas) == tokenizer.decode(expected)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "function", "function": {"name": "get_time"}}, {"get_time"}),
        ("required", {"get_weather", "get_time"}),
    ],
    ids=["named", "required"],
)
def test_a_demanded_tool_is_called_with_arguments_of_its_schema(
    text_server: Server, tokenizer: Any, choice: Any, names: set[str]
) -> None:
    # A random model would write spaces and call tools for ever, which the grammar allows.
    bias = {str(token): -100 for token in range(len(tokenizer)) if not tokenizer.decode(token).strip()}
    options: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": choice,
        "logit_bias": bias,
        "parallel_tool_calls": False,
    }
    answer = chat(text_server, **options).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name in names
    check_weather(call.function.arguments)
    pieces = [piece.choices[0].delta for piece in chat(text_server, stream=True, **options)]
    calls = [part.function for piece in pieces for part in piece.tool_calls or ()]
    assert "".join(part.name or "" for part in calls) == call.function.name
    assert json.loads("".join(part.arguments or "" for part in calls)) == json.loads(call.function.arguments)


def test_an_answer_follows_the_json_schema_of_its_request_alone(text_server: Server) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": WEATHER}}
    with ThreadPoolExecutor(SLOTS) as threads:
        plain = threads.submit(chat, text_server)
        answers = [
            threads.submit(chat, text_server, response_format=schema, temperature=1, seed=seed) for seed in range(6)
        ]
        for answer in answers:
            check_weather(answer.result().choices[0].message.content)
        assert plain.result().choices[0].message.content == chat(text_server).choices[0].message.content


def check_weather(text: str) -> None:
    found = json.loads(text)
    assert set(found) == set(WEATHER["required"])
    assert found["city"] in WEATHER["properties"]["city"]["enum"]
    assert 1 <= found["days"] <= 9


def test_logprobs_of_requests_at_once_are_the_logits_of_transformers(
    text_server: Server, text_checkpoint: Path, tokenizer: Any, greedy: Callable[..., list[int]]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(text_checkpoint).eval()
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS[1:]]
    for prompt, answer in zip(prompts, complete(text_server, prompts, 8, logprobs=3).choices, strict=True):
        assert answer.token_ids == greedy(prompt, 8)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).topk(3)
        chosen = torch.tensor(answer.logprobs.token_logprobs)
        torch.testing.assert_close(chosen, expected.values[:, 0], rtol=0, atol=1e-4)
        for row, top in enumerate(answer.logprobs.top_logprobs):
            assert list(top) == [tokenizer.decode(token) for token in expected.indices[row]]
            torch.testing.assert_close(torch.tensor(list(top.values())), expected.values[row], rtol=0, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"extra_body": {"top_k": 40}}], ids=["host", "on_device"])
def test_a_seed_gives_two_choices_that_differ_and_come_again(text_server: Server, options: dict[str, Any]) -> None:
    first, again, other = (
        [
            choice.token_ids
            for choice in complete(text_server, "Hello", 8, temperature=1, n=2, seed=seed, **options).choices
        ]
        for seed in (5, 5, 50)  # the second choice has the next seed
    )
    assert first == again
    assert len({tuple(tokens) for tokens in first + other}) == 4


def test_a_stop_string_ends_the_text_before_it(text_server: Server, tokenizer: Any) -> None:
    whole = complete(text_server, PROMPTS[1], 24).choices[0]
    word = tokenizer.decode(whole.token_ids[9]).strip()
    answer = complete(text_server, PROMPTS[1], 24, stop=["no such words", word]).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.stop_reason == word
    assert answer.text == whole.text[: whole.text.index(word)]


def test_a_repeated_prompt_is_counted_as_cached_but_for_its_last_token(text_server: Server) -> None:
    prompt = "Zebras graze where nobody else has ever been before them, " * 3
    names = (
        "prefix_cache_hits",
        "prefix_cache_queries",
        "external_prefix_cache_hits",
        "external_prefix_cache_queries",
    )
    before = [text_server.metric(f"{name}_total") for name in names]
    first, again = (complete(text_server, prompt, 4) for _ in range(2))
    tokens = first.usage.prompt_tokens
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens == tokens - 1
    assert again.usage.prompt_tokens == tokens
    assert again.usage.completion_tokens == 4
    assert again.choices[0].token_ids == first.choices[0].token_ids
    counted = [text_server.metric(f"{name}_total") - value for name, value in zip(names, before, strict=True)]
    assert counted == [tokens - 1, 2 * tokens, 0, 0]


def test_metrics_count_running_and_waiting_requests_by_slots(text_server: Server) -> None:
    running, deferred = [0.0], [0.0]
    with ThreadPoolExecutor(SLOTS + 2) as threads:
        answers = [threads.submit(complete, text_server, f"Number {index}", 150) for index in range(SLOTS + 2)]
        while not all(answer.done() for answer in answers):
            waiting = text_server.metric("num_requests_waiting")
            running.append(text_server.metric("num_requests_running") if waiting else 0)
            deferred.append(text_server.metric("num_requests_waiting_by_reason", reason="deferred"))
    assert max(running) == SLOTS
    assert max(deferred) == 0  # who waits for a slot waits for capacity
    text_server.wait_idle()


def test_what_does_not_fit_is_refused_with_both_numbers(text_server: Server) -> None:
    message = refusal(text_server, prompt=[7] * (LENGTH + 88))
    assert str(LENGTH) in message and str(LENGTH + 88) in message
    message = refusal(text_server, new_tokens=LENGTH + 1)
    assert str(LENGTH) in message and str(LENGTH + 1) in message
    assert len(complete(text_server, [7] * (LENGTH - 1), 1).choices[0].token_ids) == 1


def test_prompt_logprobs_are_refused_with_the_reason(text_server: Server) -> None:
    message = refusal(text_server, extra_body={"prompt_logprobs": 1})
    assert (
        "prompt_logprobs needs the logits of all tokens of a prompt, and no graph of this artifact returns them"
        in message
    )


def test_a_client_that_goes_away_frees_its_slot(text_server: Server, greedy: Callable[..., list[int]]) -> None:
    generated = text_server.metric("generation_tokens_total")
    asked = LENGTH - 20
    for index in range(SLOTS):
        stream = complete(text_server, [100 + index, 7, 8], asked, stream=True)
        for _ in range(2):
            next(stream)
        stream.close()
    text_server.wait_idle()
    assert text_server.metric("generation_tokens_total") - generated < SLOTS * asked
    prompts = [[200 + index, 7, 8] for index in range(2 * SLOTS)]
    for prompt, choice in zip(prompts, complete(text_server, prompts, 12).choices, strict=True):
        assert choice.token_ids == greedy(prompt, 12)


def test_a_request_is_a_span_below_its_clients(text_server: Server, shared_server: SharedServer) -> None:
    """The option is vLLM's; `optimum-cli neuron serve` passes it on."""
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    text_server.client.completions.create(
        model=text_server.model,
        prompt=[7, 8, 9],
        max_tokens=4,
        extra_body={"ignore_eos": True},
        extra_headers={"traceparent": f"00-{trace}-{parent}-01"},
    )

    def spans() -> list[Any]:
        return [span for span in shared_server.collector.spans if span.trace_id.hex() == trace]

    wait_for(lambda: any(span.name == "llm_request" for span in spans()))
    (span,) = [span for span in spans() if span.name == "llm_request"]
    found = read_attributes(span)
    assert span.parent_span_id.hex() == parent
    assert (found["gen_ai.usage.prompt_tokens"], found["gen_ai.usage.completion_tokens"]) == (3, 4)
    assert 0 <= found["gen_ai.latency.time_in_queue"] <= found["gen_ai.latency.e2e"]
