# SPDX-License-Identifier: Apache-2.0
"""The language model inside a multimodal checkpoint: its config, a class that runs it alone, and its weights."""

from __future__ import annotations

import logging
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoModelForMultimodalLM,
)

from ..errors import first_line


logger = logging.getLogger(__name__)

# The same modules in the same order: what differs is a rule that the language model alone does not follow.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
_PROMPT = 6


class TextModelForCausalLM(PreTrainedModel):
    """A text model that transformers has only as a part of multimodal ones, with a head of its own.

    `register_language_model` makes a subclass for each config class.
    """

    base_model_prefix = "model"
    _supports_attention_backend = True
    _supports_sdpa = True
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan: ClassVar[dict[str, str]] = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.model = AutoModel.from_config(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutput:
        """Return `[rows, tokens, vocab]` logits of all tokens, or of those that `logits_to_keep` names."""
        hidden = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs
        ).last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutput(logits=self.lm_head(hidden[:, kept]))


def find_text_config(config: PreTrainedConfig, source: str) -> PreTrainedConfig:
    """Return the config of the causal language model: `config` itself, or a part of a multimodal one.

    Raises:
        ValueError: there is no such model, or transformers cannot run it alone.
    """
    text_config = config.get_text_config(decoder=True)
    if not isinstance(text_config, PreTrainedConfig):
        raise ValueError(
            f"{source}: its config holds {text_config!r} in the place of the config of its language model; correct it, or download "
            f"it again"
        )
    if config.is_encoder_decoder or text_config.is_encoder_decoder:
        raise ValueError(f"{source} is an encoder-decoder ({config.model_type}); only decoders can be exported")
    if text_config is config:
        if _look_up(MODEL_FOR_CAUSAL_LM_MAPPING, config) is None:
            raise ValueError(
                f"{source} is a {config.model_type} model ({type(config).__name__}), and transformers has no causal language "
                f"model of this kind; only decoders of text can be exported"
            )
        return config
    if _look_up(MODEL_FOR_MULTIMODAL_LM_MAPPING, config) is _look_up(MODEL_FOR_CAUSAL_LM_MAPPING, config) is None:
        raise ValueError(
            f"{source} is a {config.model_type} model, which generates no text; only decoders of text can be exported"
        )
    _register_config(text_config, config, source)
    return text_config


def register_language_model(config: PreTrainedConfig) -> None:
    """Register the config of a text model that transformers has only inside of others with AutoModelForCausalLM."""
    _register_config(config, config, config.model_type)


def multimodal_class(config: PreTrainedConfig) -> Any:
    """Return the auto class that loads a multimodal checkpoint as a whole."""
    known = _look_up(MODEL_FOR_MULTIMODAL_LM_MAPPING, config) is not None
    return AutoModelForMultimodalLM if known else AutoModelForCausalLM


def text_prompt(config: PreTrainedConfig) -> Tensor:
    """Return `[1, 6]` tokens that stand for text; the config names those that stand for images and the like."""
    names = ("_token_id", "_token_index", "_id")
    ids = [value for name, value in config.to_dict().items() if name.endswith(names)]
    vocab_size = config.get_text_config(decoder=True).vocab_size
    tokens = (token for token in range(vocab_size // 3, vocab_size) if token not in ids)
    return torch.tensor([[next(tokens) for _ in range(_PROMPT)]])


def take_text_part(whole: PreTrainedModel, source: str) -> PreTrainedModel:
    """Return the language model of a multimodal one, as a model of its own with the very same weights.

    Raises:
        ValueError: its parts were not found, or it computes something else than the whole does on text.
    """
    model = find_text_part(whole, source)
    model.generation_config = getattr(whole, "generation_config", None)
    model.eval()
    _check_result(model, whole, source)
    _log_left_out(model, whole, source)
    return model


def find_text_part(whole: PreTrainedModel, source: str) -> PreTrainedModel:
    """Return the modules of `whole` that are its language model, with or without weights; raise ValueError where there are none."""
    text_config = whole.config.get_text_config(decoder=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text_config, dtype=whole.dtype)
    found = [module for module in whole.modules() if type(module) is type(model)]
    if found:
        model = found[0]
    else:
        _fill_model(model, whole, source)
    head: Any = model.get_output_embeddings()
    model.config.tie_word_embeddings = head.weight is model.get_input_embeddings().weight
    return model


def _fill_model(model: PreTrainedModel, whole: PreTrainedModel, source: str) -> None:
    """Put the language modules of `whole` into `model`, which has none."""
    own = [(name, module) for name, module in model.named_children() if isinstance(module, PreTrainedModel)]
    bodies = [module for module in whole.modules() if len(own) == 1 and type(module) is type(own[0][1])]
    head = whole.get_output_embeddings()
    if len(bodies) != 1 or head is None:
        raise ValueError(
            f"{source}: the language model of {type(whole).__name__} cannot be separated from its other parts: {len(bodies)} modules "
            f"are those of {type(model).__name__}, and it has {'no' if head is None else 'a'} head"
        )
    name, body = own[0][0], cast(PreTrainedModel, bodies[0])
    setattr(model, name, body)
    model.set_output_embeddings(head)
    model.config = body.config  # the very object that its layers look at
    filled = {id(tensor) for tensor in (*whole.parameters(), *whole.buffers())}
    unfilled = [key for key, tensor in (*model.named_parameters(), *model.named_buffers()) if id(tensor) not in filled]
    if unfilled:
        raise ValueError(
            f"{source}: {type(whole).__name__} has no weights for {unfilled[0]} of {type(model).__name__}"
        )


def _check_result(model: PreTrainedModel, whole: PreTrainedModel, source: str) -> None:
    if any(getattr(module, "is_causal", True) is False for module in model.modules()):
        raise ValueError(
            f"{source}: the language model of {type(whole).__name__} attends in both directions; only causal ones can be exported"
        )
    prompt = text_prompt(whole.config)
    try:
        with torch.inference_mode():
            expected = whole(input_ids=prompt, use_cache=False).logits.float()
            positions = torch.arange(_PROMPT, dtype=torch.int32)[None]
            logits = model(input_ids=prompt, position_ids=positions, use_cache=False).logits.float()
    except (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError) as error:
        raise ValueError(
            f"{source}: {type(whole).__name__} does not run on text alone: {first_line(error)}"
        ) from error
    difference = float((logits - expected).abs().max() / (expected.max() - expected.min()).clamp(min=1e-30))
    if not difference <= _TOLERANCE[model.dtype]:
        raise ValueError(
            f"{source}: the language model of {type(whole).__name__} cannot run alone: on text, its logits differ by "
            f"{difference:.1g} of their range from those of the whole"
        )


def _log_left_out(model: PreTrainedModel, whole: PreTrainedModel, source: str) -> None:
    used = {id(tensor) for tensor in model.parameters()}
    counts: dict[str, int] = {}
    for name, module in _unused_parts(whole, used):
        counts[name] = sum(tensor.numel() for tensor in module.parameters() if id(tensor) not in used)
    left_out = ", ".join(f"{name} ({count / 1e6:.1f} M parameters)" for name, count in counts.items() if count)
    logger.warning(
        "%s: exporting its language model, %s; left out: %s",
        source,
        type(model).__name__,
        left_out or "nothing that has weights",
    )


def _unused_parts(module: nn.Module, used: set[int], prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Return the largest modules without parameters in use, by name."""
    parts = []
    for name, child in module.named_children():
        members = {id(tensor) for tensor in child.parameters()}
        if members & used and not members <= used:
            parts += _unused_parts(child, used, f"{prefix}{name}.")
        elif members and not members & used:
            parts.append((f"{prefix}{name}", child))
    return parts


def _register_config(text_config: PreTrainedConfig, config: PreTrainedConfig, source: str) -> None:
    if _look_up(MODEL_FOR_CAUSAL_LM_MAPPING, text_config) is not None:
        return
    outer = _look_up(MODEL_FOR_CAUSAL_LM_MAPPING, config)
    if getattr(outer, "config_class", None) is type(text_config):
        model_class = outer
    else:
        body = _look_up(MODEL_MAPPING, text_config)
        if body is None:
            raise ValueError(
                f"{source} is a {config.model_type} model, and transformers has no class for its language model alone "
                f"({type(text_config).__name__})"
            )
        name = body.__name__.removesuffix("Model") + "ForCausalLM"
        model_class = type(name, (TextModelForCausalLM,), {"config_class": type(text_config)})
    AutoModelForCausalLM.register(
        type(text_config), model_class, exist_ok=True
    )  # otherwise it leaves out its own configs


def _look_up(mapping: Any, config: PreTrainedConfig) -> Any:
    """Return the class of a config in a mapping of transformers, or None."""
    try:
        found = mapping[type(config)]
    except (KeyError, ValueError):
        return None
    return found[0] if isinstance(found, (tuple, list)) else found
