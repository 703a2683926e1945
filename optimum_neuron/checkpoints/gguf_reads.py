# SPDX-License-Identifier: Apache-2.0
"""A GGUF file parsed once: transformers parses it anew for the config, the tokenizer and the weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..graphs.one_thread import one_thread


# What transformers imports from gguf where it reads a file.
_READER = "GGUFReader"
_NAMES = "get_tensor_name_map"  # each module of a model asks for it, and it makes the names of all layers


class GgufReads:
    """What has been read of GGUF files: the same file is not parsed again within `shared`."""

    def __init__(self) -> None:
        self._made: dict[str, Callable[..., Any]] = {}

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Has gguf answer with what it has answered before; torch rounds what numpy has dequantized, with the one thread of both."""
        import gguf

        originals = {name: getattr(gguf, name) for name in (_READER, _NAMES)}
        if not self._made:
            plain = originals | {_READER: _over_plain_arrays(originals[_READER])}
            self._made = {name: functools.cache(make) for name, make in plain.items()}
        for name, made in self._made.items():
            setattr(gguf, name, made)
        try:
            with one_thread():
                yield
        finally:
            for name, original in originals.items():
                setattr(gguf, name, original)


def _over_plain_arrays(reader: Any) -> Any:
    """The class of readers over a plain view of the mapped file: a vocabulary is a hundred thousand slices, costly in a memmap."""

    class PlainReader(reader):
        @property
        def data(self) -> np.ndarray:
            return self._data

        @data.setter
        def data(self, mapped: np.memmap) -> None:
            self._data = np.asarray(mapped)

    return PlainReader
