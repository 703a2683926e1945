# SPDX-License-Identifier: Apache-2.0
"""Single tokens as text and as bytes, for log-probabilities."""

from __future__ import annotations

import re
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from .detokenizer import UNREADABLE


# How tokenizers with byte fallback name a byte.
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


def finite(logprob: float) -> float:
    """JSON has no infinity and no NaN: OpenAI writes this number for what has no chance."""
    return logprob if logprob > -9999.0 else -9999.0


class TokenTexts:
    """Of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def text(self, token_id: int) -> str:
        """What the token alone reads as: U+FFFD where its bytes are part of a character."""
        text: str = self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        return text

    def bytes(self, token_id: int) -> list[int] | None:
        """The bytes of the token's text; None where they are not known."""
        text = self.text(token_id)
        if UNREADABLE not in text:
            return list(text.encode())
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        if match := _BYTE.fullmatch(name):
            return [int(match[1], 16)]
        return [_BYTES[each] for each in name] if all(each in _BYTES for each in name) else None
