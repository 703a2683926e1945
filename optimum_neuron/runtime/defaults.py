# SPDX-License-Identifier: Apache-2.0
"""Defaults of a request: one rule for every caller, which is transformers' own.

A keyword of a call goes first, then a given GenerationConfig, then the artifact's generation_config.json, then what transformers has
where all of them are silent: the best token, and `top_k=50` of those that are drawn.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, TextGenerationPipeline

from ..config import NeuronConfig
from ..errors import first_line
from ..step.model_spec import ModelSpec
from .lengths import most_new_tokens
from .refused import split_defaults, warn_once
from .token_choice import find_host_reason


logger = logging.getLogger(__name__)

_LENGTHS = ("max_new_tokens", "max_length")
_ASKED = "_length_is_asked"
# What `generate` alone returns.
OF_GENERATE = ("output_scores", "output_logits")
# vLLM's parameters that a generation config names, too. vLLM's requests bring stop strings (`stop`) and further penalties themselves: it
# takes none of them from a file, and has no limit of time.
OF_VLLM = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")


class Defaults(GenerationMixin):
    """The part of a model that gives an artifact's defaults to calls."""

    neuron_config: NeuronConfig
    device = torch.device("cpu")

    def __init__(self, config: Any, generation_config: GenerationConfig, neuron_config: NeuronConfig) -> None:
        self.config, self.generation_config, self.neuron_config = config, generation_config, neuron_config

    def settled(self, given: GenerationConfig | None = None) -> GenerationConfig:
        """Return a copy of `given` with the value of each setting that a request gets, but for the lengths: see `new_tokens`."""
        config: GenerationConfig = self._prepare_generation_config(given or GenerationConfig())[0]
        for name in _LENGTHS:
            value = getattr(given, name, None)
            setattr(config, name, getattr(self.generation_config, name) if value is None else value)
        return config

    def new_tokens(self, config: GenerationConfig, prompt: int, rows: int = 1) -> int | None:
        """Return how many tokens follow a prompt by a settled config; None where nothing says it.

        A length that no call asks for ends where the cache does. A `max_length` that the prompt has reached says nothing.
        """
        wanted, name = config.max_new_tokens, "max_new_tokens"
        if wanted is None and config.max_length is not None:
            wanted, name = config.max_length - prompt, "max_length"
        most = max(most_new_tokens(prompt, self.neuron_config, rows), 1)
        if wanted is None or getattr(config, _ASKED, True) or 1 <= wanted <= most:
            return wanted
        warn_once(
            f"the default {name}={getattr(config, name)} does not fit every prompt in "
            f"sequence_length={self.neuron_config.sequence_length}; such texts end where the cache does"
        )
        return most

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        asked = _asks_length(generation_config, self.generation_config, kwargs)
        config, rest = super()._prepare_generation_config(generation_config, **kwargs)
        setattr(config, _ASKED, asked)
        return config, rest

    def _prepare_generated_length(self, generation_config: GenerationConfig, **facts: Any) -> GenerationConfig:
        """Return transformers' lengths, which fit where no call asks for them."""
        config: GenerationConfig = super()._prepare_generated_length(generation_config, **facts)
        rows, columns = len(facts["inputs_tensor"]) * (config.num_return_sequences or 1), facts["input_ids_length"]
        config.max_length = columns + (self.new_tokens(config, columns, rows) or 0)
        return config


def _asks_length(given: GenerationConfig | None, defaults: GenerationConfig, keywords: Mapping[str, Any]) -> bool:
    """Return whether a call says itself how long a text may become. Of two lengths, `max_new_tokens` counts, as in transformers."""
    if getattr(given, _ASKED, None) is False:  # by a pipeline, which got it from here
        given = None
    for name in _LENGTHS:
        value, default = getattr(given, name, None), getattr(defaults, name, None)
        if keywords.get(name) is not None:
            return True
        if value is not None or default is not None:
            return value not in (None, default, getattr(TextGenerationPipeline._default_generation_config, name))
    return False


def usable(found: GenerationConfig, sizes: NeuronConfig) -> tuple[GenerationConfig, dict[str, str]]:
    """Return an artifact's defaults without what no artifact of its sizes does, and of each of these, by name, the reason."""
    config = copy.deepcopy(found)
    reasons = split_defaults(config)
    if config.temperature is not None and config.temperature <= 0:
        config.do_sample, config.temperature = False, None
    if config.top_k is not None and config.top_k < 0:  # none, as vLLM writes it
        config.top_k = 0
    copies = config.num_return_sequences or 1
    if copies > 1 and not (config.do_sample and copies <= sizes.batch_size):
        reasons["num_return_sequences"] = f"it needs do_sample and batch_size={copies}"
        config.num_return_sequences = None
    return config, reasons


def in_vocabulary(config: GenerationConfig, model: ModelSpec) -> GenerationConfig:
    """Return the config without special tokens that the model does not have: files of cut-down models name others."""
    eos = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = [token for token in eos if token is not None and 0 <= token < model.vocab_size]
    if ends:
        config.eos_token_id = ends
    if config.pad_token_id is None or not 0 <= config.pad_token_id < model.num_embeddings:
        config.pad_token_id = None if ends else 0  # where nothing ends a row, nothing follows its end
    return config


def follow_defaults(found: GenerationConfig, model_config: Any, sizes: NeuronConfig, source: str) -> NeuronConfig:
    """Return the options of an export with what a checkpoint's defaults need; raise ValueError if transformers refuses one.

    What no artifact does is logged.
    """
    config, reasons = usable(found, sizes)
    for name, reason in reasons.items():
        logger.warning(
            "generation_config.json asks for %s=%r, which is left out: %s", name, getattr(found, name), reason
        )
    names = settings_of_host(config, model_config, sizes, source)
    if not names or sizes.returns_decode_logits:
        return sizes
    logger.warning(
        "generation_config.json asks for %s, applied to logits on the host: the graphs return logits, as with --output-logits",
        ", ".join(f"{name}={_shown(getattr(config, name))}" for name in names),
    )
    return dataclasses.replace(sizes, output_logits=True)


def _shown(value: object) -> str:
    return textwrap.shorten(repr(value), 60, placeholder=" ...")


def settings_of_host(config: GenerationConfig, model_config: Any, sizes: NeuronConfig, source: str) -> list[str]:
    """Return settings that are applied to logits on the host, in any call; raise ValueError if transformers refuses a value."""
    rules = Defaults(model_config, GenerationConfig(), sizes)
    eos = 0 if config.eos_token_id is None else config.eos_token_id
    names = []
    for name, value in vars(config).items():
        if value is None or name.startswith("_") or name in ("do_sample", "eos_token_id", "num_return_sequences"):
            continue
        try:
            alone = rules.settled(GenerationConfig(**{name: value}, do_sample=True, eos_token_id=eos))
            reason = find_host_reason(processors_of(rules, alone, np.zeros(1)), do_sample=True)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{source}: its generation_config.json has {name}={_shown(value)} ({first_line(error)}); correct or remove it"
            ) from error
        if reason is not None:
            names.append(name)
    returned = OF_GENERATE if config.return_dict_in_generate else ()
    return names + [name for name in returned if getattr(config, name)]


def processors_of(rules: Any, config: GenerationConfig, prompt: np.ndarray) -> LogitsProcessorList:
    """Return what transformers applies to the logits of a request for a prompt `[n]`; the config's special tokens become tensors."""
    rules._prepare_special_tokens(config, device="cpu")
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    processors: LogitsProcessorList = rules._get_logits_processor(
        config, input_ids_seq_length=prompt.size, encoder_input_ids=ids, device="cpu"
    )
    return processors


def stop_strings(config: GenerationConfig) -> tuple[str, ...]:
    """Return the texts that end an answer."""
    given = config.stop_strings
    return (given,) if isinstance(given, str) else tuple(given or ())


def left_to_requests(config: GenerationConfig, of_logits: Sequence[str]) -> list[str]:
    """Return settings of a file that vLLM takes from requests alone, or not at all, among them those `of_logits`."""
    ends = [name for name in ("stop_strings", "max_time") if getattr(config, name)]
    return [name for name in (*of_logits, *ends) if name not in OF_VLLM]


def vllm_sampling(config: GenerationConfig) -> dict[str, Any]:
    """Return defaults of a file as vLLM's `override_generation_config` takes them: where the file draws no token, the best one."""
    given = {name: getattr(config, name) for name in OF_VLLM if getattr(config, name) is not None}
    return given if config.do_sample else given | {"temperature": 0.0}
