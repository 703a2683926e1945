# SPDX-License-Identifier: Apache-2.0
"""What a server serves: a loaded artifact, its engine's thread and its tokenizer."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from ..config import NeuronConfig
from ..continuous_batching.requests import end_token_ids
from ..engine.service import EngineService
from ..graphs.spec import SamplingParams
from ..modeling import NeuronModelForCausalLM


logger = logging.getLogger(__name__)

# Of generation_config.json: what requests get that say nothing, else OpenAI's; and what no request gets here.
_OPENAI = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
_NOT_APPLIED = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_new_tokens": 0, "bad_words_ids": None}


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model under the name that requests use.

    Attributes:
        defaults: how tokens are chosen where a request says nothing.
        eos_token_ids: tokens that end every answer.
        vocab_size: tokens that the model chooses among.
        num_embeddings: tokens that it takes.
        load_seconds: what loading it took.
        created: when, in seconds since 1970.
    """

    name: str
    service: EngineService
    tokenizer: Any
    config: NeuronConfig
    defaults: SamplingParams
    eos_token_ids: frozenset[int]
    vocab_size: int
    num_embeddings: int
    load_seconds: float
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(
        cls, model: NeuronModelForCausalLM, service: EngineService, tokenizer: Any, name: str, load_seconds: float
    ) -> ServedModel:
        """Of a loaded model, whose generation_config.json has the defaults."""
        generation = model.generation_config
        for option, neutral in _NOT_APPLIED.items():
            if getattr(generation, option, None) not in (None, neutral):
                logger.warning(
                    "%s=%s of generation_config.json is not applied: tokens are chosen in the graphs",
                    option,
                    getattr(generation, option),
                )
        given = {option: getattr(generation, option, None) for option in _OPENAI}
        spec = model.artifact.model
        return cls(
            name=name,
            service=service,
            tokenizer=tokenizer,
            config=model.neuron_config,
            defaults=SamplingParams(**{key: _OPENAI[key] if value is None else value for key, value in given.items()}),
            eos_token_ids=end_token_ids(generation, model),
            vocab_size=spec.vocab_size,
            num_embeddings=spec.num_embeddings,
            load_seconds=load_seconds,
        )
