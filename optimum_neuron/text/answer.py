# SPDX-License-Identifier: Apache-2.0
"""The text of one request, piece by piece, and its times."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from ..core import FinishReason
from ..engine.stream import TokenStream
from .stream import Detokenizer, StopStrings


class TextAnswer:
    """The text of a request as it comes; iterate over its pieces once. A stop string ends it, and is left out.

    Attributes:
        prompt_tokens: tokens of the prompt.
        times: `time.perf_counter()` of each token.
        ending: the reason of its end; None until then.
    """

    def __init__(
        self, stream: TokenStream, tokenizer: Any, stop_strings: Sequence[str] = (), *, prompt_tokens: int = 0
    ) -> None:
        self._stream = stream
        self._detokenizer, self._stops = Detokenizer(tokenizer), StopStrings(stop_strings)
        self.prompt_tokens = prompt_tokens
        self.times: list[float] = []
        self.ending: FinishReason | None = None

    def __iter__(self) -> Iterator[str]:
        stream, stops = self._stream, self._stops
        with stream:
            for token in stream:
                self.times.append(time.perf_counter())
                if stream.finish_reason != "stop" and (piece := stops.push_text(self._detokenizer.push_token(token))):
                    yield piece
                if stops.found is not None:
                    break
            self.ending = stream.finish_reason if stops.found is None else "stop"
        if stops.found is None and (rest := stops.push_text(self._detokenizer.take_rest(), is_last=True)):
            yield rest

    def abort(self) -> None:
        """End the answer, from any thread or a signal's handler."""
        self._stream.abort()
