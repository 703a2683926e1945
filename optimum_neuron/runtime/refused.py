# SPDX-License-Identifier: Apache-2.0
"""Settings that no request may ask for, and why: one list for generate, batches, chats, files of defaults and the server. Imports no torch."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any


logger = logging.getLogger(__name__)

_SHOWN = bool | int | float | str | list | tuple | dict
_SECOND_CACHE = "it needs a second cache per row"
_RETURNED = dict.fromkeys(
    ("output_attentions", "output_hidden_states"), "compiled graphs return tokens and logits only"
)
# Settings of transformers that no artifact honours, with the reason. None, 0, False and nothing ask for nothing.
_REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            "num_beams", "num_beam_groups", "diversity_penalty", "penalty_alpha", "constraints", "force_words_ids", "dola_layers",
            "token_healing", "is_assistant", "assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "speculation_type",
            "use_mtp",
        ),
        "compiled graphs advance one sequence per row",
    ),
    **dict.fromkeys(("guidance_scale", "negative_prompt_ids", "negative_prompt_attention_mask"), _SECOND_CACHE),
    **_RETURNED,
}  # fmt: skip
# Of these, 1 asks for nothing either.
_ONE_IS_NONE = ("num_beams", "num_beam_groups", "guidance_scale")
# Settings that change no token, each with the one value that would.
_INERT: dict[str, tuple[Any, str]] = {
    "use_cache": (False, "there are no graphs of steps without a cache"),
    "cache_implementation": ("quantized", "it rounds the cache; export with --kv-cache-dtype"),
    **dict.fromkeys(("cache_config", "max_cache_len", "compile_config", "disable_compile", "prefill_chunk_size"), (..., "")),
}  # fmt: skip
# Members of a request to the server that change nothing where they have one of these values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bad_words": ([],), "best_of": (1,), "cache_salt": (), "detokenize": (True,), "early_stopping": (False,), "echo": (False,),
    "frequency_penalty": (0,), "function_call": ("none",), "functions": ([],), "include_reasoning": (True,),
    "include_stop_str_in_output": (False,), "length_penalty": (1,), "logit_bias": ({},), "min_tokens": (0,), "mm_payload": ("tensors",),
    "modalities": (["text"],), "parallel_tool_calls": (True, False), "presence_penalty": (0,), "priority": (0,),
    "repetition_penalty": (1,), "response_format": ({"type": "text"},), "return_mm_kwargs": (False,), "return_prompt_text": (False,),
    "return_token_offsets": (False,), "return_tokens_as_token_ids": (False,), "routed_experts_prompt_start": (0,),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,), "suffix": ("",), "tool_choice": ("none", "auto"),
    "tools": ([],), "use_beam_search": (False,), "watermarking": (False,),
}  # fmt: skip
# Labels and hints, which change no answer of this server whatever they are.
_HINTS = frozenset({
    "metadata", "prediction", "prompt_cache_key", "prompt_cache_retention", "request_id", "safety_identifier", "service_tier",
    "session_id", "store", "verbosity",
})  # fmt: skip
# Of the others, those that vLLM does with the same artifact.
_OF_VLLM = (
    "bad_words", "best_of", "echo", "frequency_penalty", "include_stop_str_in_output", "logit_bias", "min_tokens",
    "presence_penalty", "repetition_penalty", "response_format", "tool_choice", "tools",
)  # fmt: skip


@functools.cache
def warn_once(message: str) -> None:
    """Warn of what is alike in every call."""
    logger.warning("%s", message)


def split_defaults(config: Any) -> dict[str, str]:
    """Take from a file's settings what no artifact honours, and what means nothing; return the reasons of the first by name."""
    reasons = {name: reason for name, reason in _REFUSED.items() if _asks(name, getattr(config, name, None))}
    for name in (*_REFUSED, *_INERT):
        if getattr(config, name, None) is not None:
            setattr(config, name, None)
    return reasons


def refuse_settings(settings: Mapping[str, Any], *, returns_dict: bool) -> None:
    """Raise ValueError where a setting asks for what no artifact does; `returns_dict`: the call returns more than tokens."""
    for name, value in settings.items():
        if name in _REFUSED and _asks(name, value) and (returns_dict or name not in _RETURNED):
            asked = f"{name}={value!r}" if isinstance(value, _SHOWN) else name
            raise ValueError(f"{asked} is not supported: {_REFUSED[name]}; leave it out")


def check_settings(asked: Mapping[str, Any], *, returns_dict: bool) -> None:
    """Raise ValueError as `refuse_settings` for what a call asks for, and log once what has no effect."""
    refuse_settings(asked, returns_dict=returns_dict)
    for name, (wrong, reason) in _INERT.items():
        value = asked.get(name)
        if value is not None and value == wrong:
            raise ValueError(f"{name}={value!r} is not supported: {reason}; leave it out")
        if value and value is not (wrong is False):  # a cache is what all graphs have
            warn_once(f"{name}={value!r} has no effect: the graphs and their cache were made at export")


def member_refusal(name: str, value: object, choices: int) -> str | None:
    """Return what to do about a request's member, where it would change the answer; None where it changes nothing.

    `best_of` may be as many as the `choices` of each prompt. Raises KeyError if no server knows such a member.
    """
    if name in _HINTS or value in _NEUTRAL[name] or (name == "best_of" and value == choices):
        return None
    return "leave it out" + (", or serve the artifact by vLLM (--backend vllm)" if name in _OF_VLLM else "")


def _asks(name: str, value: Any) -> bool:
    if isinstance(value, _SHOWN):
        return bool(value) and not (name in _ONE_IS_NONE and value == 1)
    return value is not None


def sampling_keywords(
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> dict[str, Any]:
    """Return keywords for what is given; what is None stays as the artifact's defaults have it.

    A temperature of 0 takes the best token. Another temperature draws, and so does each of the others that narrows a draw.
    """
    if temperature == 0:
        return {"do_sample": False}
    values = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    narrows = bool(top_k) or (top_p is not None and top_p < 1) or bool(min_p)
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    return given | ({"do_sample": True} if temperature is not None or narrows else {})
