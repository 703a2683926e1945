# SPDX-License-Identifier: Apache-2.0
"""What both routes take: bodies of requests -> what is asked, all of it honoured or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...config import NeuronConfig
from ...runtime.asked_sampling import sampling_keywords
from ...runtime.refused import member_refusal
from .errors import ApiError
from .fields import Fields, check_token_id, shown, wrong
from .served_model import ServedModel


MOST_CHOICES, MOST_STOPS, LONGEST_STOP, MOST_TOP_LOGPROBS = 128, 16, 256, 20
HOTTEST = 100
_COLDEST = float(np.finfo(np.float32).tiny)
LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Conversation:
    """Messages for the chat template.

    Attributes:
        characters: of their texts.
        begins_answer: whether the prompt ends with what begins an answer.
        continues_last: whether the answer continues the last message.
        options: further values that the template may read.
    """

    messages: list[dict[str, Any]]
    characters: int
    begins_answer: bool
    continues_last: bool
    options: Mapping[str, Any]


# A text, token ids, or what a chat template makes a text of.
Prompt = str | list[int] | Conversation


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request asks, whatever its route.

    Attributes:
        n: choices of each prompt.
        max_tokens: most tokens of a choice; None: as many as fit.
        limit: what the client calls that.
        sampling: keywords of `generate`; what they leave out follows the artifact's defaults.
        stop: texts that end a choice; None: those of the artifact's defaults.
        special_tokens: whether the tokenizer adds its special tokens to a text.
        logprobs: how many of the most likely tokens are told of each; None: nothing is told.
        include_usage: whether a stream ends with the counts.
        continuous_usage: whether each of its events has those so far.
        return_token_ids: whether the answer has token ids, of the prompt and of each piece.
    """

    prompts: Sequence[Prompt]
    n: int
    max_tokens: int | None
    limit: str
    sampling: Mapping[str, Any]
    seed: int | None
    stop: tuple[str, ...] | None
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    logprobs: int | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    special_tokens: bool


def check_model(fields: Fields, served: ServedModel) -> None:
    """Raises ApiError where a request names no model, or another one."""
    name = fields.text("model")
    if name is None:
        raise ApiError(f"the request names no model; this server has {served.name!r}", param="model")
    if name != served.name:
        raise unknown_model(name, served)


def unknown_model(name: str, served: ServedModel) -> ApiError:
    """The refusal of a name."""
    return ApiError(
        f"the model {shown(name)} does not exist; this server has {served.name!r}",
        status=404,
        param="model",
        code="model_not_found",
    )


def read_common(
    fields: Fields,
    served: ServedModel,
    *,
    prompts: Sequence[Prompt],
    max_tokens: int | None,
    limit: str,
    logprobs: int | None,
    special_tokens: bool,
) -> Asked:
    """Reads what both routes have, and adds what one of them has read; what is left of the fields must not change anything.

    Args:
        special_tokens: what a route does where the request says nothing.

    Raises:
        ApiError: a member has a wrong value, or asks for what this server cannot do.
    """
    stream = fields.flag("stream")
    include_usage, continuous_usage = _usage(fields, stream)
    asked = Asked(
        prompts=prompts,
        n=fields.whole("n", 1, MOST_CHOICES) or 1,
        max_tokens=max_tokens,
        limit=limit,
        sampling=_sampling(fields),
        seed=fields.whole("seed", -(2**63), 2**63 - 1),
        stop=fields.texts("stop", MOST_STOPS, LONGEST_STOP),
        stop_token_ids=_stop_token_ids(fields, served),
        ignore_eos=fields.flag("ignore_eos"),
        logprobs=logprobs,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        return_token_ids=fields.flag("return_token_ids"),
        special_tokens=fields.flag("add_special_tokens", special_tokens),
    )
    _check_logprobs(logprobs, served.config)
    fields.text("user")  # a label, which changes no answer
    if asked.ignore_eos and not asked.stop and not asked.stop_token_ids:
        fields.whole("min_tokens", 0, max_tokens or LARGEST)  # nothing ends the text before
    _refuse(fields.rest, asked.n)
    return asked


def _sampling(fields: Fields) -> Mapping[str, Any]:
    top_k = fields.whole("top_k", -1, LARGEST)
    return sampling_keywords(
        temperature=_temperature(fields),
        top_p=fields.number("top_p", 0, 1),
        min_p=fields.number("min_p", 0, 1),
        top_k=0 if top_k == -1 else top_k,  # none, as for vLLM
    )


def _temperature(fields: Fields) -> float | None:
    """Behind the hottest all tokens are alike; so cold that float32 has no such number, the best one is always taken."""
    value = fields.number("temperature", 0, HOTTEST)
    return 0.0 if value is not None and value < _COLDEST else value


def _stop_token_ids(fields: Fields, served: ServedModel) -> frozenset[int]:
    ids = fields.any("stop_token_ids") or []
    if not isinstance(ids, list):
        raise wrong("stop_token_ids", ids, "a list of token ids")
    return frozenset(check_token_id("stop_token_ids", each, served.vocab_size) for each in ids)


def _usage(fields: Fields, stream: bool) -> tuple[bool, bool]:
    """Return whether a stream ends with the counts, and whether each event has them; as for vLLM, the second needs the first."""
    value = fields.any("stream_options")
    if value is None:
        return False, False
    if not isinstance(value, Mapping):
        raise wrong("stream_options", value, "an object")
    if not stream:
        raise ApiError("stream_options has no meaning without stream=true; leave it out", param="stream_options")
    options = Fields(value)
    include, continuous = options.flag("include_usage"), options.flag("continuous_usage_stats")
    if options.any("include_obfuscation"):
        raise ApiError("stream_options.include_obfuscation is not supported; leave it out", param="stream_options")
    for name in options.rest:
        raise ApiError(f"stream_options has no member {shown(name)}; leave it out", param="stream_options")
    return include, include and continuous


def _check_logprobs(count: int | None, config: NeuronConfig) -> None:
    told = config.top_logprobs
    if count is None:
        return
    if told is None:
        raise ApiError(
            f"logprobs need an artifact that returns them, and this one returns none; export it with --top-logprobs {count}",
            param="logprobs",
        )
    if count > told:
        raise ApiError(
            f"the request asks for the {count} most likely tokens, and this artifact returns {told}; ask for fewer, or export it with "
            f"--top-logprobs {count}",
            param="logprobs",
        )


def _refuse(rest: Mapping[str, Any], n: int) -> None:
    for name, value in rest.items():
        try:
            remedy = member_refusal(name, value, n)
        except KeyError:
            raise ApiError(f"{shown(name)} is no member that this server knows; leave it out", param=name) from None
        if remedy is not None:
            raise ApiError(
                f"{name}={shown(value)} is not supported; {remedy}", param=name, code="unsupported_parameter"
            )
