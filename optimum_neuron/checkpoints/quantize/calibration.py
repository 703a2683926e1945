# SPDX-License-Identifier: Apache-2.0
"""The text on which weights are rounded, read and cut into sequences of tokens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...config import NeuronConfig
from ..checkpoint import Checkpoint


# Tokens of a sequence and sequences, at most: what layers get of so many is in memory at a time.
_LENGTH, _SEQUENCES = 512, 16
# Fewer say little of what a layer's inputs have in common.
LEAST_TOKENS = 512
_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Calibration:
    """Tokens of a text.

    Attributes:
        ids: `[sequences, tokens]` int64.
        sha256: the digest of the text's file.
    """

    ids: Tensor
    sha256: str


def read_calibration(path: str | Path, checkpoint: Checkpoint, config: NeuronConfig) -> Calibration:
    """Return sequences that lie evenly in a text in UTF-8, each with the tokenizer's beginning of a text.

    Raises:
        ValueError: the config rounds no weights to int4; the file is empty, too large or no text in UTF-8, or has too few tokens; the
            checkpoint has no tokenizer, or one of another vocabulary.
        FileNotFoundError: there is no such file.
    """
    path = Path(path).expanduser()
    if config.quantization != "int4":
        raise ValueError(
            f"quantization_calibration={str(path)!r} is a text on which weights are rounded to int4, and quantization={config.quantization!r}; "
            f"leave it out, or pass --quantization int4 (quantization='int4')"
        )
    data, text = _read_text(path)
    tokens, begin = _make_tokens(text, checkpoint)
    if len(tokens) < LEAST_TOKENS:
        raise ValueError(
            f"{path} has {len(tokens)} tokens, and weights are rounded on {LEAST_TOKENS} of them at least; name a longer text"
        )
    sizes = checkpoint.load_config().get_text_config(decoder=True)
    vocabulary = getattr(sizes, "vocab_size", None)
    if vocabulary is not None and max(tokens) >= vocabulary:
        raise ValueError(
            f"{checkpoint.source}: its tokenizer makes the token {max(tokens)} of {path}, and the model has {vocabulary}; restore the "
            f"tokenizer's files"
        )
    longest = getattr(sizes, "max_position_embeddings", None) or _LENGTH
    own = min(_LENGTH, longest if longest > 0 else _LENGTH) - len(begin)
    return Calibration(_cut_sequences(tokens, begin, max(1, own)), hashlib.sha256(data).hexdigest())


def _read_text(path: Path) -> tuple[bytes, str]:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is not there"
        raise FileNotFoundError(f"{path}, a text to round weights on, {what}; name a file of text in UTF-8")
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise ValueError(
            f"{path} has {size:,} bytes, and a text to round weights on {_MOST_BYTES:,} at most, of which {_LENGTH * _SEQUENCES:,} tokens "
            f"are taken; name a part of it"
        )
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is no text in UTF-8: byte {error.start} is 0x{data[error.start]:02x}; convert it, or name another file"
        ) from error
    if "\0" in text:
        raise ValueError(f"{path} is no text: byte {data.index(0)} is 0; name a file of text in UTF-8")
    if not text.strip():
        raise ValueError(f"{path} is empty, and weights are to be rounded on its text; name another file")
    return data, text


def _make_tokens(text: str, checkpoint: Checkpoint) -> tuple[list[int], list[int]]:
    """Return a text's tokens, and those that begin a text."""
    tokenizer: Any = checkpoint.tokenizer
    if tokenizer is None:
        raise ValueError(
            f"{checkpoint.source} has no tokenizer, and weights are to be rounded on a text; add its files (tokenizer.json and its like), or "
            f"leave out --quantization-calibration"
        )
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    first = tokenizer("a", verbose=False)["input_ids"][:1]
    return tokens, first if first == [tokenizer.bos_token_id] else []


def _cut_sequences(tokens: list[int], begin: list[int], length: int) -> Tensor:
    """Return sequences of `begin` and `length` tokens, or of all tokens where there are fewer."""
    length = min(length, len(tokens))
    count = min(_SEQUENCES, len(tokens) // length)
    last = len(tokens) - length
    starts = [last * number // max(1, count - 1) for number in range(count)]
    return torch.tensor([[*begin, *tokens[start : start + length]] for start in starts])
