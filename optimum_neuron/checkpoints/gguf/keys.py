# SPDX-License-Identifier: Apache-2.0
"""The keys of a GGUF file: each is translated, compared, or listed as one without effect; all others are refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .header import GgufHeader, GgufTensor


REMEDY = "export the checkpoint that the file was made from"

# Keys that no number of the model depends on, and why. Here and below, a key of the architecture stands without its name.
_WITHOUT_EFFECT = {
    r"general\..*": "it describes the file",
    r"tokenizer\..*": "the tokenizer is made of it",
    r"quantize\..*": "it says how the codes were chosen",
    r"mradermacher\..*": "it names the author of the file",
    r"split\.tensors\.count": "it counts the tensors",
    r"rope\.scaling\.finetuned": "it says how the model was trained",
    r"pooling_type": "only embeddings are pooled",
}
# GgufKeys that have one of some values in each file that can be exported, and what another one means.
_ALWAYS: dict[str, tuple[tuple[Any, ...], str]] = {
    "general.type": (("model",), "the file holds no model"),
    "split.no": ((0,), "the file is one of several parts"),
    "split.count": ((0, 1), "the file is one of several parts"),
    "attention.causal": ((True,), "a token of this model attends to later ones"),
}
_OF_ALL_ARCHITECTURES = ("general.", "split.", "tokenizer.")
# The defaults of generation in a file, by transformers' names. Source: gguf's constants.py, GgufKeys.General.
_SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"
}  # fmt: skip
# In the place of a default: the file must have the key.
NEEDED: Any = object()


class GgufKeys:
    """The keys of a file by their names without the architecture; `tensors` are names of those that the config is read from.

    A method that takes a key raises ValueError where it has a value of another kind, or is missing and has no default.
    """

    def __init__(self, header: GgufHeader, source: str) -> None:
        self.header = header
        self.source = source
        self.tensors: set[str] = set()
        self._prefix = f"{header.architecture}."
        self._left = set(header.values)

    def __contains__(self, key: str) -> bool:
        return self._full_name(key) in self.header.values

    def take_whole(self, key: str, default: Any = NEEDED, least: int = 0) -> Any:
        """Take a whole number of at least `least`."""
        return self._take_value(key, default, lambda value: type(value) is int and value >= least, "a whole number")

    def take_number(self, key: str, default: Any = NEEDED) -> Any:
        """Take a finite number."""
        return self._take_value(key, default, _is_finite, "a finite number")

    def take_text(self, key: str, default: Any = NEEDED) -> Any:
        return self._take_value(key, default, lambda value: isinstance(value, str), "a text")

    def take_flag(self, key: str, default: Any = NEEDED) -> Any:
        return self._take_value(key, default, lambda value: isinstance(value, bool), "true or false")

    def take_layers(self, key: str, layers: int, default: Any = NEEDED) -> Any:
        """Take a number of all layers, or a tuple of one for each."""

        def is_right(value: Any) -> bool:
            return type(value) is int or (isinstance(value, tuple) and len(value) == layers)

        return self._take_value(key, default, is_right, f"a whole number or {layers} of them")

    def require_same(self, key: str, *allowed: Any, why: str) -> None:
        """Refuse a key with a value that is not allowed, with the reason `why`."""
        value = self._take_value(key, allowed[0], lambda _: True, "")
        if not any(type(value) is type(each) and value == each for each in allowed):
            raise self.make_refusal(key, why)

    def find_tensor(self, name: str) -> GgufTensor:
        """Return the place of a tensor that the config needs."""
        if name not in self.header.tensors:
            raise self._lacking_error(f"the tensor {name}")
        return self.header.tensors[name]

    def make_refusal(self, key: str, why: str) -> ValueError:
        """Return an error that names a key and its value."""
        name = self._full_name(key)
        return ValueError(f"{self.source} has {name}={_show_value(self.header.values.get(name))}: {why}; {REMEDY}")

    def check_all_taken(self) -> None:
        """Raise ValueError where a key was not taken, and is not listed as one without effect."""
        for key, (allowed, why) in _ALWAYS.items():
            self.require_same(key, *allowed, why=why)
        for name in sorted(self._left):
            if not any(re.fullmatch(pattern, name.removeprefix(self._prefix)) for pattern in _WITHOUT_EFFECT):
                raise ValueError(
                    f"{self.source} has {name}={_show_value(self.header.values[name])}, and it is not known what a "
                    f"{self.header.architecture} model computes by it; {REMEDY}"
                )

    def _full_name(self, key: str) -> str:
        return key if key.startswith(_OF_ALL_ARCHITECTURES) else f"{self._prefix}{key}"

    def _lacking_error(self, name: str) -> ValueError:
        return ValueError(f"{self.source} lacks {name}, without which its model is not known; convert it again")

    def _take_value(self, key: str, default: Any, is_right: Callable[[Any], bool], kind: str) -> Any:
        name = self._full_name(key)
        self._left.discard(name)
        value = self.header.values.get(name, NEEDED)
        if value is NEEDED:
            if default is NEEDED:
                raise self._lacking_error(name)
            return default
        if not is_right(value):
            raise ValueError(f"{self.source} has {name}={_show_value(value)}, which is not {kind}; convert it again")
        return value


def sampling_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of generation that a file names, as fields of a GenerationConfig.

    llama.cpp samples unless the temperature is 0, so a file that says how makes the artifact sample too.
    """
    named = {ours: values.get(f"general.sampling.{theirs}") for theirs, ours in _SAMPLING.items()}
    found = {name: value for name, value in named.items() if _is_finite(value)}
    if found.keys() & {"temperature", "top_k", "top_p", "min_p"} and found.get("temperature") != 0:
        found["do_sample"] = True
    elif "temperature" in found:
        found = {name: value for name, value in found.items() if name == "repetition_penalty"}
    return found


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _show_value(value: Any) -> str:
    """Return a value in a short form: it may be any text or a long array."""
    text = repr(list(value)) if isinstance(value, Sequence) and not isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
