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
    """A text model that transformers has only as a part of multimodal ones, with a head; `register_language_model` makes subclasses."""

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
    """Return the config of the causal language model, perhaps a part; raise ValueError where transformers cannot run one alone."""
    text_config = config.get_text_config(decoder=True)
    if not isinstance(text_config, PreTrainedConfig):
        raise ValueError(
            f"{source}: its config holds {text_config!r} in place of its language model's config; correct it, or download it again"
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
    register_language_model(text_config, config, source)
    return text_config


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
    """Return the language model of a multimodal one with the same weights; raise ValueError where on text it computes something else."""
    model = find_text_part(whole, source)
    model.generation_config = getattr(whole, "generation_config", None)
    model.eval()
    _check_result(model, whole, source)
    left_out = ", ".join(_unused_parts(whole, {id(tensor) for tensor in model.parameters()}))
    logger.warning(
        f"{source}: exporting its language model, {type(model).__name__}; left out: {left_out or 'nothing that has weights'}"
    )
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


def _unused_parts(module: nn.Module, used: set[int], prefix: str = "") -> list[str]:
    """Return the names of the largest modules without parameters in use, with the number of their parameters."""
    parts = []
    for name, child in module.named_children():
        members = {id(tensor): tensor.numel() for tensor in child.parameters()}
        if members.keys() & used and not members.keys() <= used:
            parts += _unused_parts(child, used, f"{prefix}{name}.")
        elif members and not members.keys() & used:
            parts.append(f"{prefix}{name} ({sum(members.values()) / 1e6:.1f} M parameters)")
    return parts


def register_language_model(
    text_config: PreTrainedConfig, whole: PreTrainedConfig | None = None, source: str = ""
) -> None:
    """Register the config of a text model that transformers has only inside of others with AutoModelForCausalLM."""
    config = whole or text_config
    if _look_up(MODEL_FOR_CAUSAL_LM_MAPPING, text_config) is not None:
        return
    outer = _look_up(MODEL_FOR_CAUSAL_LM_MAPPING, config)
    if getattr(outer, "config_class", None) is type(text_config):
        model_class = outer
    else:
        body = _look_up(MODEL_MAPPING, text_config)
        if body is None:
            raise ValueError(
                f"{source or config.model_type} is a {config.model_type} model, and transformers has no class for its language model alone "
                f"({type(text_config).__name__})"
            )
        name = body.__name__.removesuffix("Model") + "ForCausalLM"
        model_class = type(name, (TextModelForCausalLM,), {"config_class": type(text_config)})
    # Without exist_ok it leaves out its own configs.
    AutoModelForCausalLM.register(type(text_config), model_class, exist_ok=True)


def _look_up(mapping: Any, config: PreTrainedConfig) -> Any:
    try:
        found = mapping[type(config)]
    except (KeyError, ValueError):
        return None
    return found[0] if isinstance(found, (tuple, list)) else found
