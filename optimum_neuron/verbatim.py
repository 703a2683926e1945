# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's files beside the weights, as an artifact takes them over."""

from __future__ import annotations

import fnmatch
import json
import shutil
from pathlib import Path

from transformers import PreTrainedModel


# What an artifact takes over verbatim: configuration, tokenizer, chat templates; never weights.
VERBATIM = ("*.json", "*.txt", "*.model", "*.jinja", "additional_chat_templates/*.jinja")
NOT_VERBATIM = ("*.index.json", "neuron_config.json", "adapter_config.json")
CODE_FILES = ("*.py",)
TOKENIZER_FILES = (
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.jinja",
)  # fmt: skip


def copy_files(checkpoint: Path, folder: Path, *, with_code: bool) -> None:
    """Copies configuration and tokenizer, and with `with_code` the modeling code."""
    _copy(checkpoint, folder, VERBATIM + (CODE_FILES if with_code else ()), NOT_VERBATIM)


def describes_another(folder: Path, model: PreTrainedModel) -> bool:
    """Whether a folder's config.json is not that of `model`, but of a multimodal or a quantized one."""
    document = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return document.get("model_type") != model.config.model_type or bool(document.get("quantization_config"))


def write_config(model: PreTrainedModel, folder: Path) -> None:
    """Writes the model's own config.json, and removes what tells how to prepare images and sound."""
    for path in folder.glob("*processor_config.json"):
        path.unlink()
    model.config.architectures = [type(model).__name__]  # GGUF has no word for it, and servers read it
    model.config.save_pretrained(folder)


def replace_tokenizer(adapter: Path, folder: Path) -> None:
    """An adapter that was saved with a tokenizer was trained with it."""
    if not any(_matches(path.name, TOKENIZER_FILES) for path in adapter.iterdir()):
        return
    for path in folder.iterdir():
        if _matches(path.name, TOKENIZER_FILES):
            path.unlink()
    _copy(adapter, folder, TOKENIZER_FILES, ())


def _copy(source: Path, folder: Path, patterns: tuple[str, ...], others: tuple[str, ...]) -> None:
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if path.is_file() and _matches(name, patterns) and not _matches(name, others):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(name.count("/") == pattern.count("/") and fnmatch.fnmatch(name, pattern) for pattern in patterns)
