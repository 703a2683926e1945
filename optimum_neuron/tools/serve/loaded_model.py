# SPDX-License-Identifier: Apache-2.0
"""The model of a server: a loaded artifact, its engine's thread and its tokenizer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ...engine.service import EngineService


if TYPE_CHECKING:
    from ...generate.model import NeuronModelForCausalLM
    from ...generate.text_model import TextModel


class LoadedModel:
    """A model under the name that requests use.

    Args:
        load_seconds: time that loading it took.

    Attributes:
        requests: maker of the engine's requests, with the defaults of the artifact's generation_config.json.
        vocab_size, num_embeddings: number of tokens that the model chooses from, and that it takes.
        created: time of loading, in seconds since 1970.

    Raises:
        ValueError: the artifact cannot do what its generation_config.json asks.
    """

    def __init__(
        self,
        model: TextModel | NeuronModelForCausalLM,
        service: EngineService,
        tokenizer: Any,
        name: str,
        load_seconds: float,
    ) -> None:
        self.name, self.service, self.tokenizer, self.load_seconds = name, service, tokenizer, load_seconds
        self.config = model.neuron_config
        self.requests = model.make_requests()
        self.vocab_size, self.num_embeddings = model.artifact.model.vocab_size, model.artifact.model.num_embeddings
        self.created = int(time.time())
