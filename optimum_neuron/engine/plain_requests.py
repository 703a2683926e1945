# SPDX-License-Identifier: Apache-2.0
"""Requests that leave the choice of tokens to the graphs, made without transformers.

An artifact's generation_config.json may ask for more, logits processors above all. Then, and where a request does, transformers' own
rules make the request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from ..artifact.artifact import Artifact
from ..artifact.schema import read_object
from ..core import Request, check_whole_numbers
from ..runtime.lengths import most_new_tokens
from ..runtime.refused import warn_once
from ..step.spec import GREEDY, SamplingParams


DEFAULTS_NAME = "generation_config.json"
# transformers narrows draws so where neither a file nor a call does.
_TOP_K = 50
# Settings that mean nothing here, whatever their value.
_SILENT = {
    "_from_model_config", "transformers_version", "bos_token_id", "pad_token_id", "decoder_start_token_id", "use_cache",
}  # fmt: skip
# Settings that change no token where they have one of these values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,), "num_beams": (1,), "num_beam_groups": (1,), "num_return_sequences": (1,), "length_penalty": (1,),
    "no_repeat_ngram_size": (0,), "min_length": (0,), "diversity_penalty": (0,), "typical_p": (1,), "epsilon_cutoff": (0,),
    "eta_cutoff": (0,), "output_scores": (False,), "output_logits": (False,), "output_attentions": (False,),
    "output_hidden_states": (False,), "return_dict_in_generate": (False,), "remove_invalid_values": (False,),
    "renormalize_logits": (False,), "early_stopping": (False,),
}  # fmt: skip
# Keywords of `generate` by which the graphs choose.
CHOICES = ("do_sample", "temperature", "top_k", "top_p", "min_p")


class RequestMaker(ABC):
    """A way to make the requests of an artifact.

    Attributes:
        stop_strings: texts that end an answer.
        eos_token_ids: tokens that end an answer.
    """

    stop_strings: tuple[str, ...] = ()
    eos_token_ids: frozenset[int]

    @abstractmethod
    def new_tokens(self, prompt: int) -> int | None:
        """Return how many tokens follow a prompt where no call says it; None where the artifact's file does not either."""

    @abstractmethod
    def choose_options(
        self,
        prompt: np.ndarray,
        max_new_tokens: int | None,
        eos_token_ids: frozenset[int],
        sampling: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the fields of a request that say how its tokens are chosen."""

    def make_request(
        self,
        request_id: str,
        input_ids: Sequence[int] | np.ndarray,
        max_new_tokens: int | None,
        eos_token_ids: frozenset[int] | None = None,
        *,
        sampling: Mapping[str, Any] = MappingProxyType({}),
        seed: int | None = None,
        logprobs: bool = False,
    ) -> Request:
        """Return a request.

        Args:
            sampling: keywords of `generate` by which this request chooses otherwise; for others the artifact's file speaks.
            seed: makes sampling repeatable.
            logprobs: whether the graphs return log-probabilities of its tokens, before any processor.

        Raises:
            ValueError, TypeError: no request can be made of them.
        """
        prompt = np.asarray(input_ids)
        if max_new_tokens is None:
            max_new_tokens = self.new_tokens(prompt.size)
        check_whole_numbers(() if max_new_tokens is None else (max_new_tokens,), "max_new_tokens")
        eos_token_ids = self.eos_token_ids if eos_token_ids is None else eos_token_ids
        fields: dict[str, Any] = {"max_new_tokens": max_new_tokens, "logprobs": logprobs}
        fields |= self.choose_options(prompt, max_new_tokens, eos_token_ids, sampling)
        return Request(
            request_id=request_id, prompt_token_ids=prompt, eos_token_ids=eos_token_ids, seed=seed, **fields
        )


@dataclass(frozen=True, kw_only=True)
class PlainDefaults:
    """An artifact's generation_config.json, where graphs and engine do all that it asks."""

    eos_token_ids: frozenset[int]
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_new_tokens: int | None = None
    max_length: int | None = None


def read_plain_defaults(artifact: Artifact) -> PlainDefaults | None:
    """Return an artifact's defaults; None where only transformers can read or follow them."""
    if DEFAULTS_NAME not in artifact.manifest["files"] or not artifact.config.on_device_sampling:
        return None
    try:
        found = read_object(artifact.path / DEFAULTS_NAME)
    except ValueError:
        return None
    given = {name: value for name, value in found.items() if value is not None and name not in _SILENT}
    eos, own = given.pop("eos_token_id", None), {}
    for name, value in given.items():
        if name in PlainDefaults.__dataclass_fields__ and name != "eos_token_ids":
            own[name] = value
        elif value not in _NEUTRAL.get(name, ()):
            return None
    ends = eos if isinstance(eos, list) else [eos]
    if not all(type(end) is int for end in ends) or not _are_plain(own):
        return None
    if own.get("temperature", 1) <= 0:
        own |= {"do_sample": False, "temperature": None}
    if own.get("top_k", 0) < 0:  # none, as vLLM writes it
        own["top_k"] = 0
    return PlainDefaults(eos_token_ids=frozenset(end for end in ends if 0 <= end < artifact.model.vocab_size), **own)


def _are_plain(values: Mapping[str, Any]) -> bool:
    """Return whether all values have the types and ranges that transformers takes."""
    whole = (values.get(name, 1) for name in ("top_k", "max_new_tokens", "max_length"))
    top_p, min_p = values.get("top_p", 1.0), values.get("min_p", 0.0)
    return (
        type(values.get("do_sample", False)) is bool
        and all(type(each) is int for each in whole)
        and type(values.get("temperature", 1.0)) is float
        and type(top_p) in (int, float)
        and type(min_p) in (int, float)
        and 0 < top_p <= 1 >= min_p >= 0
        and values.get("max_new_tokens", 1) > 0
    )


class PlainRequests(RequestMaker):
    """Makes an artifact's requests, but for those that ask for more than the graphs do. Its file names no stop strings.

    Args:
        asked: those of `CHOICES` that all requests share.
        by_transformers: makes the requests that ask for more.
    """

    def __init__(
        self,
        artifact: Artifact,
        defaults: PlainDefaults,
        asked: Mapping[str, Any],
        by_transformers: Callable[[], RequestMaker],
    ) -> None:
        self._config = artifact.config
        self._defaults = defaults
        given = {name: getattr(defaults, name) for name in CHOICES} | dict(asked)
        self._values = given | {"top_k": _TOP_K if given["top_k"] is None else given["top_k"]}
        self._by_transformers = by_transformers
        self.eos_token_ids = defaults.eos_token_ids

    def new_tokens(self, prompt: int) -> int | None:
        name, wanted = "max_new_tokens", self._defaults.max_new_tokens
        if wanted is None and self._defaults.max_length is not None:
            name, wanted = "max_length", self._defaults.max_length - prompt
        most = max(most_new_tokens(prompt, self._config), 1)
        if wanted is None or 1 <= wanted <= most:
            return wanted
        warn_once(
            f"the default {name}={getattr(self._defaults, name)} does not fit every prompt in "
            f"sequence_length={self._config.sequence_length}; such texts end where the cache does"
        )
        return most

    def choose_options(
        self,
        prompt: np.ndarray,
        max_new_tokens: int | None,
        eos_token_ids: frozenset[int],
        sampling: Mapping[str, Any],
    ) -> dict[str, Any]:
        if not sampling.keys() <= set(CHOICES):
            return self._by_transformers().choose_options(prompt, max_new_tokens, eos_token_ids, sampling)
        # What narrows draws by default is for requests that say nothing.
        values = {**self._values, "top_k": self._defaults.top_k, **sampling} if sampling else self._values
        if not values["do_sample"]:
            return {"sampling": GREEDY, "do_sample": False}
        temperature, top_p = (1.0 if values[name] is None else values[name] for name in ("temperature", "top_p"))
        if temperature <= 0:
            raise ValueError(
                f"temperature={temperature} must be above 0; leave out do_sample for the best token each time"
            )
        drawn = SamplingParams(values["top_k"] or 0, top_p, temperature, values["min_p"] or 0.0).in_float32()
        return {"sampling": drawn, "do_sample": True}
