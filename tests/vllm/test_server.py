# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` on a tiny artifact, asked by the `openai` client: answers, formats, counts and refusals, and how it ends."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from openai import AsyncOpenAI
from otlp_collector import read_attributes
from serving import Server, SharedServer, is_healthy, stop, wait_for
from transformers import AutoTokenizer


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
    "type": "object", "required": ["city", "days"], "additionalProperties": False,
    "properties": {"city": {"enum": ["Paris", "Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
}  # fmt: skip
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


def test_a_demanded_tool_is_called_with_arguments_of_its_schema(text_server: Server, tokenizer: Any) -> None:
    # A random model would write spaces and call tools for ever, which the grammar allows.
    bias = {str(token): -100 for token in range(len(tokenizer)) if not tokenizer.decode(token).strip()}
    options: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": "required",
        "logit_bias": bias,
        "parallel_tool_calls": False,
    }
    answer = chat(text_server, **options).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name in {"get_weather", "get_time"}
    check_weather(call.function.arguments)
    pieces = [piece.choices[0].delta for piece in chat(text_server, stream=True, **options)]
    calls = [part.function for piece in pieces for part in piece.tool_calls or ()]
    assert "".join(part.name or "" for part in calls) == call.function.name
    assert json.loads("".join(part.arguments or "" for part in calls)) == json.loads(call.function.arguments)


def check_weather(text: str) -> None:
    found = json.loads(text)
    assert set(found) == set(WEATHER["required"])
    assert found["city"] in WEATHER["properties"]["city"]["enum"]
    assert 1 <= found["days"] <= 9


@pytest.mark.parametrize("options", [{}, {"extra_body": {"top_k": 40}}], ids=["host", "on_device"])
def test_a_seed_gives_two_choices_that_differ_and_come_again(text_server: Server, options: dict[str, Any]) -> None:
    first, again, other = (
        [
            each.token_ids
            for each in complete(text_server, "Hello", 8, temperature=1, n=2, seed=seed, **options).choices
        ]
        for seed in (5, 5, 50)  # the second choice has the next seed
    )
    assert first == again
    assert len({tuple(tokens) for tokens in first + other}) == 4


def test_a_repeated_prompt_is_counted_as_cached_but_for_its_last_token(text_server: Server) -> None:
    prompt = "Zebras graze where nobody else has ever been before them, " * 3
    names = [f"{kind}prefix_cache_{what}" for kind in ("", "external_") for what in ("hits", "queries")]
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


def test_a_request_is_a_span_below_its_clients(text_server: Server, shared_server: SharedServer) -> None:
    """The option is vLLM's; `optimum-cli neuron serve` passes it on."""
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    complete(text_server, [7, 8, 9], 4, extra_headers={"traceparent": f"00-{trace}-{parent}-01"})

    def spans() -> list[Any]:
        return [span for span in shared_server.collector.spans if span.trace_id.hex() == trace]

    wait_for(lambda: any(span.name == "llm_request" for span in spans()))
    (span,) = [span for span in spans() if span.name == "llm_request"]
    found = read_attributes(span)
    assert span.parent_span_id.hex() == parent
    assert (found["gen_ai.usage.prompt_tokens"], found["gen_ai.usage.completion_tokens"]) == (3, 4)
    assert 0 <= found["gen_ai.latency.time_in_queue"] <= found["gen_ai.latency.e2e"]


def start_stream(server: Server, new_tokens: int) -> openai.Stream[openai.types.Completion]:
    """A request that has its first token."""
    stream = complete(server, [7, 8, 9], new_tokens, stream=True)
    next(stream)
    return stream


def test_sigterm_finishes_the_running_request_and_leaves_no_process(text_server: Server) -> None:
    family = text_server.processes()
    assert len(text_server.engines()) == 1
    stream = start_stream(text_server, 200)
    code = stop(text_server)
    rest = sum(len(piece.choices[0].token_ids) for piece in stream)
    assert 1 + rest == 200
    assert code == 0
    assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert "force killing" not in text_server.output()


def test_a_killed_engine_is_reported_to_its_clients_and_ends_the_server(text_server: Server) -> None:
    (engine,) = text_server.engines()
    stream = start_stream(text_server, 500)
    engine.kill()
    with pytest.raises(openai.APIError):
        for _ in stream:
            pass
    wait_for(lambda: text_server.process.poll() is not None)
    assert not is_healthy(text_server)
    assert "EngineDeadError" in text_server.output()


REQUESTS, LONGEST_PROMPT, MOST_TOKENS = 200, 300, 32


async def ask(
    client: AsyncOpenAI, model: str, prompt: list[int], new_tokens: int, pieces: int = -1, moment: float | None = None
) -> list[int] | None:
    """The tokens of a client that gives up after pieces of its stream, or a moment after asking: None where it had nothing yet."""
    options = {"model": model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "extra_body": TOKENS}
    if moment is not None:
        asking = asyncio.create_task(client.completions.create(**options))
        await asyncio.wait([asking], timeout=moment)
        return None if asking.cancel() else (await asking).choices[0].token_ids
    tokens: list[int] = []
    stream = await client.completions.create(stream=True, **options)
    async for piece in stream:
        tokens += piece.choices[0].token_ids
        pieces -= 1
        if pieces == 0:
            await stream.close()
            break
    return tokens


def test_200_clients_at_once_of_whom_a_third_gives_up_lose_nothing(
    text_server: Server, greedy: Callable[[list[int], int], list[int]]
) -> None:
    chance = random.Random(7)
    lengths = [1, 2, 31, 32, 33, LONGEST_PROMPT, *(chance.randint(1, LONGEST_PROMPT) for _ in range(14))]
    prompts = [[chance.randrange(3, 40_000) for _ in range(length)] for length in lengths]
    # Prompts that start alike, to be served from each other's slots.
    prompts += [prompts[5][:150] + prompts[-1], prompts[5][:200]]
    expected = {tuple(prompt): greedy(prompt, MOST_TOKENS) for prompt in prompts}
    jobs: list[tuple[Any, ...]] = []  # arguments of `ask`; who gives up in the middle has not nearly all yet
    for index in range(REQUESTS):
        prompt, count = chance.choice(prompts), chance.randint(1, MOST_TOKENS)
        leaves = (prompt, count, -1, chance.random() * 2) if index % 2 else (prompt, 150, chance.randint(1, 6))
        jobs.append((prompt, count) if index % 3 else leaves)
    chance.shuffle(jobs)

    async def run_all() -> list[list[int] | None]:
        async with text_server.async_client as client:
            return await asyncio.gather(*(ask(client, text_server.model, *job) for job in jobs))

    answers = asyncio.run(run_all())
    for (prompt, count, *gives_up), tokens in zip(jobs, answers, strict=True):
        right = expected[tuple(prompt)]
        if not gives_up:
            assert tokens == right[:count]
        elif tokens is not None:
            assert tokens[:MOST_TOKENS] == right[: len(tokens)]
    assert sum(tokens is None for tokens in answers) >= REQUESTS // 12
    text_server.wait_idle()
    assert complete(text_server, prompts[5], MOST_TOKENS).choices[0].token_ids == expected[tuple(prompts[5])]
    assert text_server.metric("kv_cache_usage_perc") == 0
