# SPDX-License-Identifier: Apache-2.0
"""A file of weights, written tensor by tensor; how far it came is kept beside it, and a killed export's successor goes on from there.

weights/<name>.safetensors            what is being written, or was
weights/<name>.safetensors.progress   so many of its bytes are written, and have this sha256; goes when the artifact is whole
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .. import progress
from ..checkpoints.scratch import give_back
from ..graphs.checks.parity import nonfinite
from .schema import read_object, record, text, whole
from .tensor_file import file_head, tensor_bytes


logger = logging.getLogger(__name__)

_SUFFIX = ".progress"
# Bytes between two notes of progress: what a successor writes again at most.
_BETWEEN_NOTES = 1 << 30
_PIECE = 1 << 24
_PROGRESS = record({"bytes": whole(1, 2**63 - 1), "sha256": text(r"[0-9a-f]{64}")}, closed=True)

Described = tuple[str, torch.dtype, tuple[int, ...]]

_noting: ContextVar[bool] = ContextVar("whether progress is noted, and notes are followed", default=False)


@contextmanager
def noting_progress() -> Iterator[None]:
    """Within it, `write_tensor_files` notes how far it came, and goes on where a note is; who enters it knows that notes are of the same."""
    token = _noting.set(True)
    try:
        yield
    finally:
        _noting.reset(token)


def write_tensor_files(
    paths: Sequence[Path], tensors: Sequence[Described], make: Callable[[str, int], Tensor]
) -> None:
    """Writes safetensors files with tensors of the same names, types and shapes; within `noting_progress`, what is left of those of which
    notes say that their beginning is written.

    Args:
        tensors: name, type and shape of each, in the order of `tensor_file.file_head`.
        make: the tensor of a name and the number of a file; called for all files before the next name, and not for what is written
            already.

    Raises:
        OSError: a file cannot be written; the error names it.
        ValueError: a tensor holds NaN or infinity.
    """
    head = file_head(tensors)
    sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in tensors]
    ends = list(accumulate(sizes, initial=len(head)))[1:]
    with ExitStack() as stack:
        files = [stack.enter_context(_opened(path)) for path in paths]
        done = [file.begin(head, ends) for file in files]
        advance = stack.enter_context(progress.stage("Writing", sum(sizes) * len(files)))
        for (name, _, _), size, end in zip(tensors, sizes, ends, strict=True):
            for number, file in enumerate(files):
                if end > done[number]:
                    tensor = make(name, number)
                    problem = nonfinite(name.removeprefix("model."), tensor)
                    if problem:
                        raise ValueError(problem)
                    file.write(tensor_bytes(tensor))
                    give_back(tensor)
                advance(name, size)
        for file in files:
            file.note()


@contextmanager
def _opened(path: Path) -> Iterator[_Written]:
    with _naming(path), path.open("r+b" if _noting.get() and path.is_file() else "w+b") as file:
        yield _Written(file, path)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """A write does not tell where."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def note_of(path: Path) -> Path:
    """Where it is noted how far a file is written."""
    return path.with_name(path.name + _SUFFIX)


def progress_of(path: Path) -> tuple[int, str] | None:
    """How many bytes of a file are written, and their sha256; None where no note of it can be read."""
    try:
        document = read_object(note_of(path))
        _PROGRESS("it", document)
    except (OSError, ValueError):
        return None
    return document["bytes"], document["sha256"]


class _Written:
    """A file, its digest so far, and notes of both."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path = file, path
        self._digest: Any = hashlib.sha256()
        self._bytes = self._noted = 0

    def begin(self, head: bytes, ends: Sequence[int]) -> int:
        """How many bytes stay of what is in the file: those of its note, if they are what it says, begin with `head` and end with a
        tensor; else the head alone, which is written."""
        with _naming(self._path):
            noted = progress_of(self._path) if _noting.get() else None
            if noted is not None and self._has(head, noted[1], noted[0]) and noted[0] in (len(head), *ends):
                self._bytes = self._noted = noted[0]
                logger.info("%s: the first %d bytes are written already", self._path.name, self._bytes)
            elif noted is not None:
                logger.warning("%s does not begin with what this export writes to it; it is written again", self._path)
                self._digest = hashlib.sha256()
            self._file.seek(self._bytes)
            self._file.truncate()
            if not self._bytes:
                self._add(head)
            return self._bytes

    def _has(self, head: bytes, sha256: str, count: int) -> bool:
        if self._file.read(len(head)) != head:
            return False
        self._digest.update(head)
        left = count - len(head)
        while left > 0 and (piece := self._file.read(min(left, _PIECE))):
            self._digest.update(piece)
            left -= len(piece)
        return left == 0 and self._digest.hexdigest() == sha256

    def write(self, data: memoryview) -> None:
        with _naming(self._path):
            self._add(data)
            if self._bytes - self._noted >= _BETWEEN_NOTES:
                self.note()

    def _add(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._bytes += len(data)
        if _noting.get():
            self._digest.update(data)

    def note(self) -> None:
        """Notes progress. Where the machine crashes, the digest tells whether the bytes had reached the disk."""
        if not _noting.get() or self._bytes == self._noted:
            return
        with _naming(self._path):
            self._file.flush()
        note = note_of(self._path)
        unfinished = note.with_name(note.name + ".new")
        unfinished.write_text(json.dumps({"bytes": self._bytes, "sha256": self._digest.hexdigest()}), encoding="utf-8")
        unfinished.replace(note)
        self._noted = self._bytes
