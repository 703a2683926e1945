# SPDX-License-Identifier: Apache-2.0
"""GGUF files of tiny checkpoints by llama.cpp's own converter, in this process."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from gguf_files import add_tokenizer


# It brings a gguf of its own, which must not replace the one that is installed: hence a folder by itself, see the Makefile.
FOLDER = Path(sys.prefix) / "converter"
_OWN = ("gguf", "conversion")
# What its modules of DeepSeek's and MiniMax's models name, for others than those of the tests, and its own gguf lacks.
_ABSENT = {"MODEL_TENSOR": ("DSPARK_MARKOV_W1", "DSPARK_MARKOV_W2", "DSPARK_CONF_PROJ"), "MODEL_ARCH": ("MINIMAXM3",)}


def convert(
    checkpoint: Path, path: Path, tokens: int, add: Callable[[Any], None] = lambda writer: None, kind: str = "ALL_F32"
) -> Path:
    """Writes a checkpoint's GGUF file of a kind, with a vocabulary of single characters; `add` writes further keys."""
    with _modules() as conversion, torch.inference_mode():
        base = conversion.ModelBase
        config = base.load_hparams(checkpoint, False)
        made = conversion.get_model_class(conversion.get_model_architecture(config, conversion.ModelType.TEXT))
        # Its own vocabularies need files by sentencepiece, or a tokenizer that it knows by its hash.
        members = {"set_vocab": _vocabulary(tokens, add), "modify_tensors": _modified(made)}
        own = type("Converter", (made,), {"model_arch": made.model_arch, **members})
        gguf = sys.modules["gguf"]
        own(checkpoint, gguf.LlamaFileType[kind], path).write()
    return path


def _vocabulary(tokens: int, add: Callable[[Any], None]) -> Any:
    def write(self: Any) -> None:
        special = ["<pad>", "<s>", "</s>"]
        single = [chr(0x100 + index) for index in range(tokens - len(special) - 1)]
        words = [*special, *single, single[0] + single[1]]
        types = [3 if index < len(special) else 1 for index in range(tokens)]
        add_tokenizer(self.gguf_writer, words, types, f"{single[0]} {single[1]}")
        add(self.gguf_writer)

    return write


def _modified(made: Any) -> Any:
    def modify(self: Any, tensor: torch.Tensor, name: str, layer: int | None) -> Iterator[Any]:
        left = yield from made.modify_tensors(self, tensor, name, layer)
        yield from left or ()  # StableLM's returns what it should yield

    return modify


@contextmanager
def _modules() -> Iterator[ModuleType]:
    installed = _taken()
    sys.modules.update(_converter())
    try:
        yield sys.modules["conversion"]
    finally:
        _taken()
        sys.modules.update(installed)


@cache
def _converter() -> dict[str, ModuleType]:
    sys.path.insert(0, str(FOLDER))
    try:
        own = importlib.import_module("gguf")
        for kind, names in _ABSENT.items():
            for name in names:
                setattr(getattr(own, kind), name, None)
        conversion = importlib.import_module("conversion")
        conversion.load_all_models()
        return _taken()
    finally:
        sys.path.remove(str(FOLDER))


def _taken() -> dict[str, ModuleType]:
    """The modules of these packages, which are no longer imported then."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in _OWN}
