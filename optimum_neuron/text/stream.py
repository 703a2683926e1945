# SPDX-License-Identifier: Apache-2.0
"""Text from token ids while they come, up to a stop string; answers; and single tokens as text and as bytes.

Several tokens may make one character, and the text of a token may depend on the token before it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ..core import FinishReason
from ..engine.stream import TokenStream


# Stands for bytes that make no character.
UNREADABLE = "\ufffd"
# Tokens in a row that may leave one character open: after more, the text before the last one stays as it is.
_OPEN = 3
_WINDOW = 16
# Names of bytes in tokenizers with byte fallback.
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Bytes by their names in byte-level vocabularies (Radford et al. 2019, GPT-2): those that print stand for themselves, the others for
# characters from 256 on.
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTES = {chr(byte): byte for byte in _PRINTED} | {
    chr(256 + number): byte for number, byte in enumerate(sorted({*range(256)} - {*_PRINTED}))
}


class Detokenizer:
    """The text of one answer. Its pieces add up to the tokenizer's text of all tokens, where their bytes make characters; none
    ends within one. Special tokens have no text.

    It decodes few tokens at once: those since the last piece, and those of that piece, on which the first of them may depend.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._known = 0  # tokens of these with their text out
        self._out = 0  # characters of their text that are out
        self._open = 0  # tokens in a row after which the text ended within a character

    def push_token(self, token_id: int) -> str:
        """Take a token; return the text that is certain now."""
        self._ids.append(token_id)
        text = self._decode_ids()
        # With byte fallback all of a run is unreadable until its last character is whole; else only the last one may be open.
        stays = len(text.rstrip(UNREADABLE))
        self._open = 0 if stays == len(text) else self._open + 1
        if self._open > _OPEN:
            stays = len(text) - 1
        piece = text[self._out : stays]
        if not piece:
            return piece
        self._out = stays
        if stays == len(text):  # the next tokens depend on those of this piece at most
            self._ids = self._ids[self._known :]
            self._known, self._out = len(self._ids), len(self._decode_ids())
        elif len(self._ids) > _WINDOW:  # bytes that make no characters
            self._ids, self._known = self._ids[-_WINDOW // 2 :], 0
            text = self._decode_ids()
            self._out = len(text) - text.endswith(UNREADABLE)
        return piece

    def take_rest(self) -> str:
        """Return the rest: characters without their last bytes."""
        piece, self._ids, self._known, self._out = self._decode_ids()[self._out :], [], 0, 0
        return piece

    def _decode_ids(self) -> str:
        # Cleaned up, a text changes after its end.
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


class StopStrings:
    """A text in pieces that ends before the first stop string, and lets no part of one through.

    Attributes:
        found: the stop string that ended the text; of two that begin at the same place the first in the list.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""  # may begin one
        self.found: str | None = None

    def push_text(self, text: str, *, is_last: bool = False) -> str:
        """Take a piece; return the text before any stop string, whole or, but for the last piece, begun."""
        self._held += text
        places = [(place, number) for number, stop in enumerate(self._stops) if (place := self._held.find(stop)) >= 0]
        if places:
            out, number = min(places)
            self.found = self._stops[number]
        else:
            most = 0 if is_last else min(max(map(len, self._stops), default=1) - 1, len(self._held))
            ends = (self._held[-count:] for count in range(most, 0, -1))
            begun = (len(end) for end in ends if any(stop.startswith(end) for stop in self._stops))
            out = len(self._held) - next(begun, 0)
        text, self._held = self._held[:out], self._held[out:]
        return text


class TokenTexts:
    """Texts of one tokenizer's tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def token_text(self, token_id: int) -> str:
        """Return the text of the token alone: U+FFFD where its bytes are part of a character."""
        text: str = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return text

    def token_bytes(self, token_id: int) -> list[int] | None:
        """Return the bytes of the token's text; None where they are not known."""
        text = self.token_text(token_id)
        if UNREADABLE not in text:
            return list(text.encode())
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        if match := _BYTE.fullmatch(name):
            return [int(match[1], 16)]
        return [_BYTES[each] for each in name] if all(each in _BYTES for each in name) else None


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
