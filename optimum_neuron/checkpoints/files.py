# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint: weights that are whole and run no code, and the files that an artifact takes over."""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from safetensors import SafetensorError, safe_open

from ..errors import first_line


# Files that an artifact takes over verbatim: configuration, tokenizer, chat templates; never weights.
VERBATIM = ("*.json", "*.txt", "*.model", "*.jinja", "additional_chat_templates/*.jinja")
CODE_FILES = ("*.py",)
TOKENIZER_FILES = (
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.jinja",
)  # fmt: skip
_OBJECTS = (
    "config.json", "generation_config.json", "adapter_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.json",
)  # fmt: skip
Shapes = dict[str, tuple[list[int], str]]
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5")


def read_object(path: Path) -> dict[str, Any]:
    """Return a file's JSON object; raise ValueError where the file holds something else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({first_line(error)}); download it again") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} holds a JSON {type(document).__name__} instead of an object; download it again")
    return document


def check_documents(folder: Path) -> None:
    """Raise ValueError where a file of a checkpoint that transformers takes for a JSON object is none."""
    for name in _OBJECTS:
        if (folder / name).is_file():
            read_object(folder / name)


@dataclass(frozen=True)
class StoredWeights:
    """Counts of a checkpoint's tensors and of the most numbers that they stand for, and the tensors' names in safetensors files."""

    tensors: int
    elements: int
    names: frozenset[str] = frozenset()


def weight_files(folder: Path, source: str) -> list[Path]:
    """Return the safetensors files of a checkpoint; raise as `shapes_by_file`."""
    if (folder / SINGLE_NAME).is_file():
        return [folder / SINGLE_NAME]
    if not (folder / INDEX_NAME).is_file():
        refuse_without_weights(sorted(path.name for path in folder.iterdir()), source)
    names = sorted(set(indexed(folder / INDEX_NAME).values()))
    lacking = next((name for name in names if not (folder / name).is_file()), None)
    if lacking is not None:
        raise FileNotFoundError(f"{source} lacks {lacking}, which {INDEX_NAME} names; download it again")
    return [folder / name for name in names]


def check_weight_files(folder: Path, source: str) -> StoredWeights:
    """Read the headers of all safetensors files of a checkpoint; raise as `shapes_by_file`."""
    shapes = [each for described in shapes_by_file(folder, source).values() for each in described.items()]
    # An integer may hold 8 weights of one bit.
    elements = sum(math.prod(shape) * (1 if "F" in dtype else 8) for _, (shape, dtype) in shapes)
    return StoredWeights(len(shapes), elements, frozenset(name for name, _ in shapes))


def shapes_by_file(folder: Path, source: str) -> dict[Path, Shapes]:
    """Return shape and type of each tensor of a checkpoint, by its safetensors files.

    Raise FileNotFoundError where files are missing, ValueError where one is corrupt, two hold a tensor, or weights are pickled.
    """
    found: dict[Path, Shapes] = {}
    for path in weight_files(folder, source):
        shapes = read_shapes(path)
        twice = next((name for name in shapes if any(name in other for other in found.values())), None)
        if twice is not None:
            raise ValueError(f"{source} holds {twice} twice, in {path.name} and another; download it again")
        found[path] = shapes
    return found


def read_shapes(path: Path) -> Shapes:
    """Return shape and type of each tensor of a safetensors file; raise ValueError where size and header contradict each other."""
    try:
        with safe_open(path, "np") as file:  # numpy reads only the header
            pieces = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (piece.get_shape(), piece.get_dtype()) for name, piece in pieces.items()}
    except SafetensorError as error:
        size = path.stat().st_size
        raise ValueError(f"{path} is truncated or corrupt ({size:,} bytes: {error}); download it again") from error


def indexed(path: Path) -> dict[str, str]:
    """Return the file of each tensor; raise ValueError where the file is no index of weights, or names files elsewhere."""
    files = read_object(path).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise ValueError(f"{path} is no index of weights: its weight_map names no files; download it again")
    outside = next((name for name in sorted(files.values()) if Path(name).name != name), None)
    if outside is not None:
        raise ValueError(f"{path} names {outside!r}, which is no file of its folder; do not use this checkpoint")
    return files


def refuse_without_weights(names: Sequence[str], source: str) -> NoReturn:
    """Raise FileNotFoundError for a checkpoint with neither `SINGLE_NAME` nor `INDEX_NAME`, ValueError for pickled weights."""
    pickled = next((name for name in names if matches(name, _PICKLES)), None)
    if pickled is not None:
        raise ValueError(
            f"{source} holds its weights as {pickled}, a format that may run code; convert it to {SINGLE_NAME} by "
            f"transformers: from_pretrained(...).save_pretrained(...)"
        )
    others = [name for name in names if name.endswith(".safetensors")]
    found = f"; it has {', '.join(others[:3])}, which may not be the whole model" if others else ""
    raise FileNotFoundError(f"{source} holds no weights: neither {SINGLE_NAME} nor {INDEX_NAME}{found}")


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a name, which may be in a folder, matches one of the patterns."""
    return any(name.count("/") == pattern.count("/") and fnmatch.fnmatch(name, pattern) for pattern in patterns)
