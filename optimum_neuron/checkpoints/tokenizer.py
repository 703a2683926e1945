# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of an artifact: read once before anything is written, so that no server finds it unreadable."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ..errors import first_line
from .files import matches, read_object


logger = logging.getLogger(__name__)

CONFIG_NAME = "tokenizer_config.json"
# Vocabularies; other files only say how they are used.
_VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model")
_GGUF = "tokenizer.ggml"
# Byte-level vocabularies with texts that llama.cpp begins with a token.
_BEGINNING = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken", "chameleon",
)  # fmt: skip


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds a tokenizer's vocabulary."""
    return any(matches(path.name, _VOCABULARIES) for path in folder.iterdir())


def load_tokenizer(folder: Path, source: str, *, trust_remote_code: bool, gguf_file: str | None = None) -> Any:
    """Return the tokenizer of a folder, or of a GGUF file in it; raise ValueError where its files cannot be read."""
    try:
        if gguf_file is not None:  # AutoTokenizer would make a config of the file first, which it can of few
            return PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=gguf_file)
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises nothing narrower
        if gguf_file is None and not has_tokenizer(folder):
            raise ValueError(f"{source} has no tokenizer; add its files (tokenizer.json and its like)") from error
        raise ValueError(
            f"{source}: its tokenizer cannot be read ({first_line(error)}); restore or remove its files (tokenizer.json and its "
            f"like), or download it again"
        ) from error


def begin_as_in_gguf(tokenizer: Any, values: Mapping[str, Any]) -> None:
    """Have a GGUF file's tokenizer begin texts with a token where llama.cpp does; transformers leaves it out.

    Without a key of its own, the kind of vocabulary decides (llama.cpp's `llama-vocab.cpp`).
    """
    usual = values.get(f"{_GGUF}.model") == "llama" or values.get(f"{_GGUF}.pre") in _BEGINNING
    if not values.get(f"{_GGUF}.add_bos_token", usual) or tokenizer.bos_token is None:
        return
    token = tokenizer.bos_token
    marks = processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", token, "$B:1"], special_tokens=[(token, tokenizer.bos_token_id)]
    )
    tokenizer.backend_tokenizer.post_processor = marks


def fit_tokenizer(folder: Path, longest: int) -> None:
    """Lower the length of a folder's tokenizer to an artifact's tokens: `truncation=True` and pipelines cut a text by it."""
    if not has_tokenizer(folder):
        return
    path = folder / CONFIG_NAME
    settings = read_object(path) if path.is_file() else {}
    named = settings.get("model_max_length")
    if not isinstance(named, int | float) or named > longest:
        settings["model_max_length"] = longest
        path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_tokenizer(folder: Path, source: str, *, trust_remote_code: bool) -> None:
    """Read the tokenizer of a folder with the files of an artifact, if there is one; raise ValueError for an unreadable one."""
    if not has_tokenizer(folder):
        return
    config = read_object(folder / CONFIG_NAME) if (folder / CONFIG_NAME).is_file() else {}
    needs_sentencepiece = any(folder.glob("*.model")) and not any(folder.glob("tokenizer.json"))
    if not trust_remote_code and "AutoTokenizer" in (config.get("auto_map") or {}):
        reason = "code of the checkpoint's, which only --trust-remote-code (trust_remote_code=True) runs and copies"
    elif needs_sentencepiece and importlib.util.find_spec("sentencepiece") is None:
        reason = "sentencepiece, which is not installed"
    else:
        load_tokenizer(folder, source, trust_remote_code=trust_remote_code)
        return
    logger.warning("%s: its tokenizer is taken over unread: it needs %s", source, reason)
