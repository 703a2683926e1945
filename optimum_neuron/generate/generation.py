# SPDX-License-Identifier: Apache-2.0
"""generate over the graphs: transformers prepares and chooses, the graphs compute."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..artifact.artifact import Artifact
from ..checkpoints.tokenizer import load_tokenizer
from ..runtime.arguments import (
    check_model_arguments,
    check_options,
    check_pad_token,
    check_prefix,
    refuse_unsupported,
)
from ..runtime.defaults import Defaults
from ..runtime.generation import GenerationLoop
from ..runtime.lengths import check_fits
from ..runtime.prompts import check_prompts, unpad
from ..runtime.runner import GraphRunner
from ..runtime.token_choice import HostChoice, choose_how


class Generation(Defaults):
    """The part of `NeuronModelForCausalLM` that computes for one batch at a time."""

    artifact: Artifact
    runner: GraphRunner
    _trust_remote_code: bool
    _hold_slots: Callable[..., AbstractContextManager[None]]
    _is_stateful = True  # the KV cache lives in the graphs: transformers then refuses to rewind it

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Generate as transformers' `generate` does: greedy search and sampling for up to `batch_size` rows.

        A length that the call does not give ends where the cache does.

        Args:
            inputs: token ids `[rows, tokens]`, or `input_ids=`; padded on either side, with an `attention_mask` of the same
                shape.

        Raises:
            ValueError: an option or a size that the compiled graphs cannot honour, or a token id that the model does not
                take. No slot is changed.
            TypeError: an argument of the wrong type.
        """
        check_options(generation_config, self.generation_config, kwargs)
        for name, value in (("logits_processor", logits_processor), ("stopping_criteria", stopping_criteria)):
            if value is not None and not isinstance(value, list):
                raise TypeError(f"{name} is a {type(value).__name__}; give a list of them")
        asked = (
            kwargs.get("stop_strings"),
            getattr(generation_config, "stop_strings", None),
            self.generation_config.stop_strings,
        )
        if any(asked) and "tokenizer" not in kwargs:
            kwargs["tokenizer"] = self.own_tokenizer()
        input_ids = kwargs.get("input_ids") if inputs is None else inputs
        if input_ids is not None:
            check_prompts(input_ids, kwargs.get("attention_mask"), self.artifact.model.num_embeddings)
        if prefix_allowed_tokens_fn is not None:
            prefix_allowed_tokens_fn = check_prefix(prefix_allowed_tokens_fn, self.artifact.model.vocab_size)
        return super().generate(
            inputs, generation_config, logits_processor, stopping_criteria, prefix_allowed_tokens_fn, *args, **kwargs
        )

    def own_tokenizer(self) -> Any:
        """Return the artifact's tokenizer; raise ValueError if it has none."""
        path = self.artifact.path
        return load_tokenizer(path, str(path), trust_remote_code=self._trust_remote_code)

    def prepare_inputs_for_generation(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Any]:
        """Name the inputs of `generate`."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        check_model_arguments(model_kwargs)

    def _prepare_cache_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """No cache object: the graphs hold the state."""

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        attention_mask: Tensor | None = None,
        streamer: BaseStreamer | None = None,
        **_: Any,  # what transformers prepares for models that it runs itself
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Greedy search and sampling, called by `generate`."""
        model = self.artifact.model
        refuse_unsupported(generation_config, model.vocab_size)
        prompts = unpad(input_ids, attention_mask, model.num_embeddings)
        check_fits(prompts, generation_config.max_length - input_ids.shape[1], self.neuron_config)
        as_dict = generation_config.return_dict_in_generate
        choice = choose_how(
            logits_processor,
            self.neuron_config,
            do_sample=generation_config.do_sample,
            keep_scores=as_dict and generation_config.output_scores,
            keep_logits=as_dict and generation_config.output_logits,
        )
        pad = None
        if any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria):
            pad = check_pad_token(generation_config._pad_token_tensor, len(prompts), model.num_embeddings)
        loop = GenerationLoop(self.runner, choice, stopping_criteria, pad, streamer)
        with self._hold_slots():
            sequences = loop.generate_tokens(input_ids, prompts, generation_config.max_length)
        if not as_dict:
            return sequences
        host = choice if isinstance(choice, HostChoice) else None
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=tuple(host.scores) if host and host.scores is not None else None,
            logits=tuple(host.logits) if host and host.logits is not None else None,
        )

    def _one_sequence(self, *_: Any, **__: Any) -> None:
        raise ValueError(
            "beam search and assisted generation are not supported: compiled graphs advance one sequence per row; leave them out"
        )

    _beam_search = _assisted_decoding = _one_sequence
