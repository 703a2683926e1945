# SPDX-License-Identifier: Apache-2.0
"""From token ids to text while they come. Several tokens may make one character, and what a token reads as may depend on
the token before it."""

from __future__ import annotations

from typing import Any


# What stands for bytes that make no character.
UNREADABLE = "\ufffd"
# Tokens in a row that may leave one character open: behind more, what stands before the last one stays what it is.
_OPEN = 3
_WINDOW = 16


class Detokenizer:
    """The text of one answer. Its pieces add up to what the tokenizer reads the tokens as, where their bytes make characters;
    none ends within one. Special tokens have no text.

    It reads few tokens at once: those that came since the last piece, and before them, for what they mean to the first
    of these, those of that piece.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._known = 0  # of these, tokens whose text is out
        self._out = 0  # characters of their text that are out
        self._open = 0  # tokens in a row behind which the text ended within a character

    def push(self, token_id: int) -> str:
        """Takes a token; returns what can be read now and stays."""
        self._ids.append(token_id)
        text = self._read()
        # With byte fallback all of a run is unreadable until its last character is whole; else only the last one may be open.
        stays = len(text.rstrip(UNREADABLE))
        self._open = 0 if stays == len(text) else self._open + 1
        if self._open > _OPEN:
            stays = len(text) - 1
        piece = text[self._out : stays]
        if piece:
            self._out = stays
            self._forget(len(text))
        return piece

    def finish(self) -> str:
        """What is left: characters whose last bytes never came."""
        piece, self._ids, self._known, self._out = self._read()[self._out :], [], 0, 0
        return piece

    def _forget(self, characters: int) -> None:
        """Drops tokens that the next ones do not need."""
        if self._out == characters:
            self._ids = self._ids[self._known :]
            self._known, self._out = len(self._ids), len(self._read())
        elif len(self._ids) > _WINDOW:  # bytes that make no characters
            self._ids, self._known = self._ids[-_WINDOW // 2 :], 0
            text = self._read()
            self._out = len(text) - text.endswith(UNREADABLE)

    def _read(self) -> str:
        # Cleaned up, a text changes behind its end.
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
