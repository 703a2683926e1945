# SPDX-License-Identifier: Apache-2.0
"""`transformers serve` over an artifact, beside the same command over its checkpoint and our own server: what their clients get."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from helpers import LENGTH
from served_app import CHAT, PATIENCE, App, free_port
from transformers import AutoTokenizer
from transformers.cli.serve import Serve
from transformers.cli.serving import model_manager, utils

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.tools.serve.transformers_serve import NeuronModelManager, take_over


# What transformers serve has for text, and we have too: it has /v1/responses and speech beside them.
OPENAI = {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health"}


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Starts the command in threads of this process."""
    for module, name in ((model_manager, "ModelManager"), (utils, "CBGenerateManager")):
        monkeypatch.setattr(module, name, getattr(module, name))
    take_over()
    running = []

    def start(model: Path, **options: Any) -> Any:
        port = free_port()
        running.append(Serve(str(model), host="127.0.0.1", port=port, non_blocking=True, device="cpu", **options))
        running[-1].url = f"http://127.0.0.1:{port}"
        return running[-1]

    yield start
    for each in running:
        each.kill_server()


def texts(ask: Callable[..., Any], model: str) -> list[str]:
    """The same questions, as OpenAI's client asks them."""
    chat = ask("chat", model=model, messages=CHAT, max_tokens=6, temperature=0)
    streamed = ask("chat", model=model, messages=CHAT, max_tokens=6, temperature=0, stream=True)
    whole = ask("text", model=model, prompt="Once upon", max_tokens=6, temperature=0)
    return [chat, streamed, whole]


def client_of(url: str) -> Callable[..., str]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def ask(kind: str, **options: Any) -> str:
        create = client.chat.completions.create if kind == "chat" else client.completions.create
        return read(create(**options)) if not options.get("stream") else "".join(map(read, create(**options)))

    return ask


def read(answer: Any) -> str:
    if not answer.choices:
        return ""
    choice = answer.choices[0]
    if hasattr(choice, "text"):
        return choice.text or ""
    return (choice.message if hasattr(choice, "message") else choice.delta).content or ""


def ours(app: App) -> Callable[..., str]:
    def ask(kind: str, **options: Any) -> str:
        async def asked(client: openai.AsyncOpenAI) -> str:
            create = client.chat.completions.create if kind == "chat" else client.completions.create
            answer = await create(**options)
            return "".join([read(event) async for event in answer]) if options.get("stream") else read(answer)

        return app.asked(asked)

    return ask


def test_clients_of_transformers_serve_get_the_same_from_an_artifact_and_from_our_server(
    serve: Callable[..., Any], artifact: Path, sharp_checkpoints: dict[str, Path], app: App
) -> None:
    of_artifact, of_checkpoint = serve(artifact), serve(sharp_checkpoints["llama"])
    (loaded,) = of_artifact._model_manager.loaded_models.values()
    assert isinstance(loaded.model, NeuronModelForCausalLM)
    while not (of_artifact.server.started and of_checkpoint.server.started):
        pass
    found = texts(client_of(of_artifact.url), str(artifact))
    assert all(found) and found[0] == found[1]
    assert found == texts(client_of(of_checkpoint.url), str(sharp_checkpoints["llama"]))
    assert found == texts(ours(app), app.served.name)
    theirs = {route.path for route in of_artifact.server.config.app.routes}
    assert theirs & {route.path for route in app.app.routes} >= OPENAI  # type: ignore[attr-defined]
    assert httpx2.get(f"{of_artifact.url}/health").status_code == 200


def test_several_clients_at_once_get_what_each_gets_alone(serve: Callable[..., Any], artifact: Path) -> None:
    """Also those that say no length, for which transformers serve takes 1,024 tokens, and one that asks for a penalty."""
    server = serve(artifact, continuous_batching=True)
    plain = NeuronModelForCausalLM.from_pretrained(artifact)
    tokenizer = AutoTokenizer.from_pretrained(artifact)
    while not server.server.started:
        pass

    def expected(text: str, **options: Any) -> str:
        chat = [{"role": "user", "content": text}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        length = {"max_new_tokens": LENGTH - inputs["input_ids"].shape[1] + 1}
        tokens = plain.generate(**inputs, **{**length, **options}, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        return tokenizer.decode(tokens, skip_special_tokens=True)

    ask = client_of(server.url)
    wanted: list[tuple[dict[str, Any], str]] = [
        ({"stream": True}, expected("text 0")),
        ({}, expected("text 1")),
        ({"max_tokens": 4, "stream": True}, expected("text 2", max_new_tokens=4)),
        ({"max_tokens": 9, "frequency_penalty": 0.9}, expected("text 3", max_new_tokens=9, repetition_penalty=1.9)),
        ({"max_tokens": 9}, expected("text 4", max_new_tokens=9)),
    ]
    chats = [[{"role": "user", "content": f"text {number}"}] for number in range(len(wanted))]
    with ThreadPoolExecutor(len(wanted)) as threads:
        answers = [
            threads.submit(ask, "chat", model=str(artifact), messages=chat, **options)
            for chat, (options, _) in zip(chats, wanted, strict=True)
        ]
    # A stream leaves out a character of which the last bytes are missing.
    assert [answer.result().rstrip("\ufffd") for answer in answers] == [text.rstrip("\ufffd") for _, text in wanted]
    whole = ask("chat", model=str(artifact), messages=CHAT, max_tokens=9)
    stop = whole[len(whole) // 2]
    assert ask("chat", model=str(artifact), messages=CHAT, max_tokens=9, stop=[stop]) == whole[: whole.index(stop) + 1]


def test_what_is_decided_at_export_is_refused(artifact: Path) -> None:
    with pytest.raises(ValueError, match=r"--quantization bnb-4bit is decided when .* is exported; leave it out"):
        NeuronModelManager(device="cpu", quantization="bnb-4bit", force_model=str(artifact))
