# SPDX-License-Identifier: Apache-2.0
"""One tiny artifact that tells log-probabilities, behind the server's application without a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import export_tiny
from served_app import App, Start, start_app
from transformers import AutoTokenizer

from optimum_neuron import NeuronModelForCausalLM


@pytest.fixture(scope="session")
def artifact(sharp_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_tiny(sharp_checkpoints["llama"], tmp_path_factory.mktemp("served") / "tiny", top_logprobs=3)


@pytest.fixture(scope="session")
def model(artifact: Path) -> NeuronModelForCausalLM:
    return NeuronModelForCausalLM.from_pretrained(artifact)


@pytest.fixture(scope="session")
def tokenizer(artifact: Path) -> object:
    return AutoTokenizer.from_pretrained(artifact)


@pytest.fixture
def start(model: NeuronModelForCausalLM, tokenizer: object) -> Iterator[Start]:
    """Starts the application with a gate of its own; its service ends with the test."""
    started: list[App] = []

    def start(**options: object) -> App:
        started.append(start_app(model, **{"tokenizer": tokenizer, **options}))
        return started[-1]

    yield start
    for app in started:
        app.close()


@pytest.fixture
def app(start: Start) -> App:
    return start()
