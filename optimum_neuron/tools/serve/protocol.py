# SPDX-License-Identifier: Apache-2.0
"""A loaded model under a name, and bodies of chats and completions for it: each member is honoured or refused."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...engine.service import EngineService
from ...runtime.refused import member_refusal, sampling_keywords
from .fields import Fields, check_text, check_token_id, read_messages, shown_value, wrong_value
from .http import ApiError


if TYPE_CHECKING:
    from ...generate.model import NeuronModelForCausalLM
    from ...generate.text_model import TextModel

MOST_CHOICES, MOST_STOPS, LONGEST_STOP, MOST_TOP_LOGPROBS = 128, 16, 256, 20
HOTTEST = 100
DEFAULT_TOKENS = 16  # OpenAI's, of a completion
_COLDEST = float(np.finfo(np.float32).tiny)
LARGEST = 2**31 - 1


class LoadedModel:
    """A model under the name that requests use; raises ValueError where the artifact cannot do what its generation_config.json asks."""

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
        self.requests = model.make_requests()  # with the defaults of generation_config.json
        self.vocab_size, self.num_embeddings = model.artifact.model.vocab_size, model.artifact.model.num_embeddings
        self.created = int(time.time())


@dataclass(frozen=True)
class Conversation:
    """Messages for the chat template, with the characters of their texts and further values that it may read. The prompt ends with
    the beginning of an answer, or the answer continues the last message."""

    messages: list[dict[str, Any]]
    characters: int
    begins_answer: bool
    continues_last: bool
    options: Mapping[str, Any]


# A text, token ids, or messages that a chat template makes a text of.
Prompt = str | list[int] | Conversation


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of a request of any route; what is None or not in `sampling` follows the artifact's defaults."""

    prompts: Sequence[Prompt]
    n: int  # choices of each prompt
    max_tokens: int | None  # of a choice; None: as many as fit
    limit: str  # the client's name of that
    sampling: Mapping[str, Any]  # keywords of `generate`
    seed: int | None
    stop: tuple[str, ...] | None
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    logprobs: int | None  # most likely tokens for each token; None: no log-probabilities
    stream: bool
    include_usage: bool  # a stream ends with the counts
    continuous_usage: bool  # each of its events has those so far
    return_token_ids: bool
    special_tokens: bool  # the tokenizer adds its own to a text


def read_chat(data: Mapping[str, Any], served: LoadedModel) -> Asked:
    """Read a chat's body; raise ApiError where it is wrong, or this server cannot do it."""
    fields = _read_fields(data, served)
    conversation = _read_conversation(fields)
    old, new = (fields.take_whole(name, 1, LARGEST) for name in ("max_tokens", "max_completion_tokens"))
    if old is not None and new is not None and old != new:
        raise ApiError(
            f"max_tokens={old} and max_completion_tokens={new} differ; give one of them", param="max_completion_tokens"
        )
    wanted, top = fields.take_flag("logprobs"), fields.take_whole("top_logprobs", 0, MOST_TOP_LOGPROBS)
    if top and not wanted:
        raise ApiError(f"top_logprobs={top} has no meaning without logprobs=true; give both", param="top_logprobs")
    return _read_common(
        fields,
        served,
        prompts=[conversation],
        max_tokens=new if old is None else old,
        limit="max_completion_tokens" if old is None else "max_tokens",
        logprobs=(top or 0) if wanted else None,
        special_tokens=False,  # the template writes them
    )


def _read_conversation(fields: Fields) -> Conversation:
    """Read the messages and the values for the chat template: `reasoning_effort` decides `enable_thinking` too, unless the request
    does, as in vLLM 0.32 (entrypoints/openai/chat_completion/protocol.py)."""
    messages, characters = read_messages(fields.take_any("messages"))
    continues = fields.take_flag("continue_final_message")
    begins = fields.take_flag("add_generation_prompt", not continues)
    if continues and begins:
        raise ApiError(
            "add_generation_prompt=true and continue_final_message=true contradict each other; give one of them",
            param="continue_final_message",
        )
    options = fields.rest.pop("chat_template_kwargs", {})
    if not isinstance(options, Mapping):
        raise wrong_value("chat_template_kwargs", options, "an object")
    effort = fields.take_text("reasoning_effort")
    if effort is not None:
        if options.get("reasoning_effort", effort) != effort:
            text = f"reasoning_effort={effort!r} and that of chat_template_kwargs differ; give one of them"
            raise ApiError(text, param="reasoning_effort")
        options = {"enable_thinking": effort != "none", **options, "reasoning_effort": effort}
    return Conversation(messages, characters, begins, continues, options)


def read_completion(data: Mapping[str, Any], served: LoadedModel) -> Asked:
    """Read a completion's body; raise ApiError where it is wrong, or this server cannot do it."""
    fields = _read_fields(data, served)
    return _read_common(
        fields,
        served,
        prompts=_read_prompts(fields.take_any("prompt"), served),
        max_tokens=fields.take_whole("max_tokens", 1, LARGEST) or DEFAULT_TOKENS,
        limit="max_tokens",
        logprobs=fields.take_whole("logprobs", 0, MOST_TOP_LOGPROBS),
        special_tokens=True,
    )


def _read_prompts(value: Any, served: LoadedModel) -> Sequence[Prompt]:
    if isinstance(value, str):
        return [check_text("prompt", value)]
    if isinstance(value, list) and value:
        if all(isinstance(each, str) for each in value):
            return [check_text("prompt", each) for each in value]
        rows = value if all(isinstance(each, list) for each in value) else [value]
        if not any(isinstance(each, str | list) for row in rows for each in row):
            return [[check_token_id("prompt", each, served.num_embeddings) for each in row] for row in rows]
    raise ApiError(
        f"prompt is {shown_value(value)}; give a string, a list of strings, a list of token ids, or a list of such lists",
        param="prompt",
    )


def _read_fields(data: Mapping[str, Any], served: LoadedModel) -> Fields:
    fields = Fields(data)
    name = fields.take_text("model")
    if name is None:
        raise ApiError(f"the request names no model; this server has {served.name!r}", param="model")
    if name != served.name:
        raise unknown_model(name, served)
    return fields


def unknown_model(name: str, served: LoadedModel) -> ApiError:
    text = f"the model {shown_value(name)} does not exist; this server has {served.name!r}"
    return ApiError(text, status=404, param="model", code="model_not_found")


def _read_common(
    fields: Fields,
    served: LoadedModel,
    *,
    prompts: Sequence[Prompt],
    max_tokens: int | None,
    limit: str,
    logprobs: int | None,
    special_tokens: bool,
) -> Asked:
    """Read the members of both routes, and add those that one has read; all other members must change nothing."""
    stream = fields.take_flag("stream")
    include_usage, continuous_usage = _read_usage(fields, stream)
    top_k, temperature = fields.take_whole("top_k", -1, LARGEST), fields.take_number("temperature", 0, HOTTEST)
    if temperature is not None and temperature < _COLDEST:
        temperature = 0.0  # takes the best token, as does a temperature that is too small for float32
    stop_ids = fields.take_any("stop_token_ids") or []
    if not isinstance(stop_ids, list):
        raise wrong_value("stop_token_ids", stop_ids, "a list of token ids")
    asked = Asked(
        prompts=prompts,
        n=fields.take_whole("n", 1, MOST_CHOICES) or 1,
        max_tokens=max_tokens,
        limit=limit,
        sampling=sampling_keywords(
            temperature=temperature,
            top_p=fields.take_number("top_p", 0, 1),
            min_p=fields.take_number("min_p", 0, 1),
            top_k=0 if top_k == -1 else top_k,  # none, as for vLLM
        ),
        seed=fields.take_whole("seed", -(2**63), 2**63 - 1),
        stop=fields.take_texts("stop", MOST_STOPS, LONGEST_STOP),
        stop_token_ids=frozenset(check_token_id("stop_token_ids", each, served.vocab_size) for each in stop_ids),
        ignore_eos=fields.take_flag("ignore_eos"),
        logprobs=logprobs,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        return_token_ids=fields.take_flag("return_token_ids"),
        special_tokens=fields.take_flag("add_special_tokens", special_tokens),
    )
    most = served.config.top_logprobs
    if logprobs is not None and most is None:
        text = "logprobs need an artifact that returns them, and this one returns none; export it with --top-logprobs"
        raise ApiError(f"{text} {logprobs}", param="logprobs")
    if logprobs is not None and most is not None and logprobs > most:
        text = f"the request asks for the {logprobs} most likely tokens, and this artifact returns {most}; ask for fewer, or export it with"
        raise ApiError(f"{text} --top-logprobs {logprobs}", param="logprobs")
    fields.take_text("user")  # a label, which changes no answer
    if asked.ignore_eos and not asked.stop and not asked.stop_token_ids:
        fields.take_whole("min_tokens", 0, max_tokens or LARGEST)  # nothing ends the text before
    for name, value in fields.rest.items():
        try:
            remedy = member_refusal(name, value, asked.n)
        except KeyError:
            text = f"{shown_value(name)} is no member that this server knows; leave it out"
            raise ApiError(text, param=name) from None
        if remedy is not None:
            text = f"{name}={shown_value(value)} is not supported; {remedy}"
            raise ApiError(text, param=name, code="unsupported_parameter")
    return asked


def _read_usage(fields: Fields, stream: bool) -> tuple[bool, bool]:
    """Return whether a stream ends with the counts, and whether each event has them; as for vLLM, the second needs the first."""
    value = fields.rest.pop("stream_options", {})
    if not isinstance(value, Mapping):
        raise wrong_value("stream_options", value, "an object")
    if value and not stream:
        raise ApiError("stream_options has no meaning without stream=true; leave it out", param="stream_options")
    options = Fields(value)
    include, continuous = options.take_flag("include_usage"), options.take_flag("continuous_usage_stats")
    if options.take_any("include_obfuscation"):
        raise ApiError("stream_options.include_obfuscation is not supported; leave it out", param="stream_options")
    for name in options.rest:
        raise ApiError(f"stream_options has no member {shown_value(name)}; leave it out", param="stream_options")
    return include, include and continuous
