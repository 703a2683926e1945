# SPDX-License-Identifier: Apache-2.0
"""Defaults of a request that graphs and runner honour by themselves, read without transformers.

`defaults.py` has the rule for all files. This is the part of it that most files need; a file that asks for more is left to it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..artifact.artifact import Artifact
from ..artifact.schema import parse_object
from ..config import NeuronConfig
from ..step.spec import GREEDY, SamplingParams
from .lengths import most_new_tokens


DEFAULTS_NAME = "generation_config.json"
# transformers draws from so many tokens where nobody says otherwise.
_TOP_K = 50
# The least and the most of each.
_NUMBERS = {
    "temperature": (1e-30, 1e30),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "max_time": (0.0, sys.float_info.max),
}
_COUNTS = {"top_k": 0, "max_new_tokens": 1, "max_length": 1}
# These change no token here: graphs have their cache, and pad where rows of a batch have ended.
_WITHOUT_EFFECT = ("_from_model_config", "bos_token_id", "pad_token_id", "transformers_version", "use_cache")


@dataclass(frozen=True)
class PlainDefaults:
    """Defaults of an artifact, as far as its file says something.

    Attributes:
        settings: do_sample, temperature, top_k, top_p and min_p.
        eos_token_ids: tokens that end a text.
        max_new_tokens, max_length: of these the first goes before the second.
        stop_strings: texts that end an answer.
        max_time: seconds that an answer may take.
    """

    settings: Mapping[str, Any]
    eos_token_ids: frozenset[int]
    max_new_tokens: int | None
    max_length: int | None
    stop_strings: tuple[str, ...]
    max_time: float | None

    def choose_sampling(self, given: Mapping[str, Any]) -> SamplingParams:
        """Return how tokens are chosen where a request gives `refused.sampling_keywords`."""
        found = {"top_k": 0 if given else _TOP_K, **self.settings, **given}
        if not found.pop("do_sample", False):
            return GREEDY
        return SamplingParams(temperature=1.0)._replace(**found).in_float32()

    def count_new_tokens(self, prompt: int, sizes: NeuronConfig) -> int:
        """Return how many tokens may follow a prompt: no more than the cache holds, which must be at least one."""
        wanted = self.max_new_tokens
        if wanted is None and self.max_length is not None:
            wanted = self.max_length - prompt
        most = max(most_new_tokens(prompt, sizes), 1)
        return wanted if wanted is not None and 1 <= wanted <= most else most


def read_plain_defaults(artifact: Artifact) -> PlainDefaults | None:
    """Return the defaults of an artifact; None where `defaults.py` and transformers have to say what they mean."""
    if DEFAULTS_NAME not in artifact.manifest["files"] or not artifact.config.on_device_sampling:
        return None
    return parse_defaults(artifact.file(DEFAULTS_NAME).read_bytes(), artifact.model.vocab_size)


def parse_defaults(data: bytes, vocab_size: int) -> PlainDefaults | None:
    """Return the defaults that a generation_config.json holds; None as in `read_plain_defaults`."""
    try:
        found = {name: value for name, value in parse_object(data).items() if value is not None}
    except ValueError:
        return None
    ends, stops = found.pop("eos_token_id", None), found.pop("stop_strings", ())
    ends, stops = [ends] if isinstance(ends, int) else ends, [stops] if isinstance(stops, str) else stops
    lists = ((ends, int), (stops, str))
    if not ends or not all(isinstance(each, list | tuple) and _are(each, kind) for each, kind in lists):
        return None
    kept = {name: value for name, value in found.items() if name not in _WITHOUT_EFFECT}
    if not all(_is_taken(name, value) for name, value in kept.items()):
        return None
    limits = {name: kept.pop(name, None) for name in ("max_new_tokens", "max_length", "max_time")}
    known = frozenset(token for token in ends if 0 <= token < vocab_size)
    return PlainDefaults(settings=kept, eos_token_ids=known, stop_strings=tuple(stops), **limits)


def _are(values: Any, kind: type) -> bool:
    return all(isinstance(each, kind) and not isinstance(each, bool) for each in values)


def _is_taken(name: str, value: Any) -> bool:
    if name == "do_sample":
        return isinstance(value, bool)
    if name in _COUNTS:
        return type(value) is int and value >= _COUNTS[name]
    # A temperature that is a whole number is an error of transformers.
    least, most = _NUMBERS.get(name, (1.0, 0.0))
    return type(value) in ((float,) if name == "temperature" else (float, int)) and least <= value <= most
