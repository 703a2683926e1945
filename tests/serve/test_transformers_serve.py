# SPDX-License-Identifier: Apache-2.0
"""`transformers serve` over an artifact, beside the same command over its checkpoint and our own server: what their clients get."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from served_app import CHAT, PATIENCE, App, free_port
from transformers.cli.serve import Serve
from transformers.cli.serving import model_manager

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.serve.transformers_serve import NeuronModelManager


# What transformers serve has for text, and we have too: it has /v1/responses and speech beside them.
OPENAI = {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health"}


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], Any]]:
    """Starts the command in threads of this process."""
    monkeypatch.setattr(model_manager, "ModelManager", NeuronModelManager)
    running = []

    def start(model: Path) -> Any:
        port = free_port()
        running.append(Serve(str(model), host="127.0.0.1", port=port, non_blocking=True, device="cpu"))
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
    serve: Callable[[Path], Any], artifact: Path, sharp_checkpoints: dict[str, Path], app: App
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


def test_what_is_decided_at_export_is_refused(artifact: Path) -> None:
    with pytest.raises(ValueError, match=r"--quantization bnb-4bit is decided when .* is exported; leave it out"):
        NeuronModelManager(device="cpu", quantization="bnb-4bit", force_model=str(artifact))
