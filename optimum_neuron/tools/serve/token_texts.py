# SPDX-License-Identifier: Apache-2.0
"""Single tokens as text and as bytes, for log-probabilities."""

from __future__ import annotations

import re
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from .text_stream import UNREADABLE


# Names of bytes in tokenizers with byte fallback.
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


def finite_logprob(logprob: float) -> float:
    """Return a number for JSON, which has no infinity: OpenAI writes -9999 for a token without chance."""
    return logprob if logprob > -9999.0 else -9999.0


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
