# SPDX-License-Identifier: Apache-2.0
"""Members of requests that both routes take, all of them honoured or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...config import NeuronConfig
from ...runtime.refused import member_refusal, sampling_keywords
from .errors import ApiError
from .fields import Fields, check_token_id, shown_value, wrong_value
from .loaded_model import LoadedModel


MOST_CHOICES, MOST_STOPS, LONGEST_STOP, MOST_TOP_LOGPROBS = 128, 16, 256, 20
HOTTEST = 100
_COLDEST = float(np.finfo(np.float32).tiny)
LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Conversation:
    """Messages for the chat template.

    Attributes:
        characters: number of characters of their texts.
        begins_answer: whether the prompt ends with the beginning of an answer.
        continues_last: whether the answer continues the last message.
        options: further values that the template may read.
    """

    messages: list[dict[str, Any]]
    characters: int
    begins_answer: bool
    continues_last: bool
    options: Mapping[str, Any]


# A text, token ids, or messages that a chat template makes a text of.
Prompt = str | list[int] | Conversation


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of a request of any route.

    Attributes:
        n: choices of each prompt.
        max_tokens: most tokens of a choice; None: as many as fit.
        limit: the client's name of that.
        sampling: keywords of `generate`; what they leave out follows the artifact's defaults.
        stop: texts that end a choice; None: those of the artifact's defaults.
        special_tokens: whether the tokenizer adds its special tokens to a text.
        logprobs: number of most likely tokens for each token; None: no log-probabilities.
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


def check_model(fields: Fields, served: LoadedModel) -> None:
    """Raise ApiError where a request names no model, or another one."""
    name = fields.take_text("model")
    if name is None:
        raise ApiError(f"the request names no model; this server has {served.name!r}", param="model")
    if name != served.name:
        raise unknown_model(name, served)


def unknown_model(name: str, served: LoadedModel) -> ApiError:
    """Return the refusal of a name."""
    return ApiError(
        f"the model {shown_value(name)} does not exist; this server has {served.name!r}",
        status=404,
        param="model",
        code="model_not_found",
    )


def read_common(
    fields: Fields,
    served: LoadedModel,
    *,
    prompts: Sequence[Prompt],
    max_tokens: int | None,
    limit: str,
    logprobs: int | None,
    special_tokens: bool,
) -> Asked:
    """Read the members of both routes, and add those that one has read; all other members must change nothing.

    Args:
        special_tokens: the route's default.

    Raises:
        ApiError: a member has a wrong value, or asks for what this server cannot do.
    """
    stream = fields.take_flag("stream")
    include_usage, continuous_usage = _read_usage(fields, stream)
    asked = Asked(
        prompts=prompts,
        n=fields.take_whole("n", 1, MOST_CHOICES) or 1,
        max_tokens=max_tokens,
        limit=limit,
        sampling=_read_sampling(fields),
        seed=fields.take_whole("seed", -(2**63), 2**63 - 1),
        stop=fields.take_texts("stop", MOST_STOPS, LONGEST_STOP),
        stop_token_ids=_read_stop_ids(fields, served),
        ignore_eos=fields.take_flag("ignore_eos"),
        logprobs=logprobs,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        return_token_ids=fields.take_flag("return_token_ids"),
        special_tokens=fields.take_flag("add_special_tokens", special_tokens),
    )
    _check_logprobs(logprobs, served.config)
    fields.take_text("user")  # a label, which changes no answer
    if asked.ignore_eos and not asked.stop and not asked.stop_token_ids:
        fields.take_whole("min_tokens", 0, max_tokens or LARGEST)  # nothing ends the text before
    _refuse_rest(fields.rest, asked.n)
    return asked


def _read_sampling(fields: Fields) -> Mapping[str, Any]:
    top_k = fields.take_whole("top_k", -1, LARGEST)
    return sampling_keywords(
        temperature=_read_temperature(fields),
        top_p=fields.take_number("top_p", 0, 1),
        min_p=fields.take_number("min_p", 0, 1),
        top_k=0 if top_k == -1 else top_k,  # none, as for vLLM
    )


def _read_temperature(fields: Fields) -> float | None:
    """Return 0, which takes the best token, for a temperature that is too small for float32."""
    value = fields.take_number("temperature", 0, HOTTEST)
    return 0.0 if value is not None and value < _COLDEST else value


def _read_stop_ids(fields: Fields, served: LoadedModel) -> frozenset[int]:
    ids = fields.take_any("stop_token_ids") or []
    if not isinstance(ids, list):
        raise wrong_value("stop_token_ids", ids, "a list of token ids")
    return frozenset(check_token_id("stop_token_ids", each, served.vocab_size) for each in ids)


def _read_usage(fields: Fields, stream: bool) -> tuple[bool, bool]:
    """Return whether a stream ends with the counts, and whether each event has them; as for vLLM, the second needs the first."""
    value = fields.take_any("stream_options")
    if value is None:
        return False, False
    if not isinstance(value, Mapping):
        raise wrong_value("stream_options", value, "an object")
    if not stream:
        raise ApiError("stream_options has no meaning without stream=true; leave it out", param="stream_options")
    options = Fields(value)
    include, continuous = options.take_flag("include_usage"), options.take_flag("continuous_usage_stats")
    if options.take_any("include_obfuscation"):
        raise ApiError("stream_options.include_obfuscation is not supported; leave it out", param="stream_options")
    for name in options.rest:
        raise ApiError(f"stream_options has no member {shown_value(name)}; leave it out", param="stream_options")
    return include, include and continuous


def _check_logprobs(count: int | None, config: NeuronConfig) -> None:
    most = config.top_logprobs
    if count is None:
        return
    if most is None:
        raise ApiError(
            f"logprobs need an artifact that returns them, and this one returns none; export it with --top-logprobs {count}",
            param="logprobs",
        )
    if count > most:
        raise ApiError(
            f"the request asks for the {count} most likely tokens, and this artifact returns {most}; ask for fewer, or export it with "
            f"--top-logprobs {count}",
            param="logprobs",
        )


def _refuse_rest(rest: Mapping[str, Any], n: int) -> None:
    for name, value in rest.items():
        try:
            remedy = member_refusal(name, value, n)
        except KeyError:
            raise ApiError(
                f"{shown_value(name)} is no member that this server knows; leave it out", param=name
            ) from None
        if remedy is not None:
            raise ApiError(
                f"{name}={shown_value(value)} is not supported; {remedy}", param=name, code="unsupported_parameter"
            )
