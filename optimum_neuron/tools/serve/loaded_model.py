# SPDX-License-Identifier: Apache-2.0
"""The model of a server: a loaded artifact, its engine's thread and its tokenizer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from ...config import NeuronConfig
from ...engine.continuous_batching.requests import RequestFactory
from ...engine.service import EngineService
from ...generate import NeuronModelForCausalLM


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model under the name that requests use.

    Attributes:
        requests: factory of the engine's requests, with the artifact's defaults of generation.
        eos_token_ids: tokens that end every answer.
        vocab_size: number of tokens that the model chooses from.
        num_embeddings: number of tokens that it takes.
        load_seconds: time that loading it took.
        created: time of it, in seconds since 1970.
    """

    name: str
    service: EngineService
    tokenizer: Any
    config: NeuronConfig
    requests: RequestFactory
    eos_token_ids: frozenset[int]
    vocab_size: int
    num_embeddings: int
    load_seconds: float
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def from_model(
        cls, model: NeuronModelForCausalLM, service: EngineService, tokenizer: Any, name: str, load_seconds: float
    ) -> LoadedModel:
        """Return a loaded model with the defaults of its generation_config.json.

        Raises:
            ValueError: the artifact cannot do what they ask.
        """
        requests, spec = RequestFactory(model, None, None, cuts_text=True), model.artifact.model
        return cls(
            name=name,
            service=service,
            tokenizer=tokenizer,
            config=model.neuron_config,
            requests=requests,
            eos_token_ids=requests.eos_token_ids,
            vocab_size=spec.vocab_size,
            num_embeddings=spec.num_embeddings,
            load_seconds=load_seconds,
        )
