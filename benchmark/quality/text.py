# SPDX-License-Identifier: Apache-2.0
"""Text that any machine has, and may be used freely: the documentation of Python's standard library, out of its docstrings.

It is that of the running Python, so figures are of one text only where their digests agree.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


# Long ones on different matters, imported without an effect, on all systems.
MODULES = (
    "argparse", "collections", "datetime", "decimal", "difflib", "doctest", "email.message", "functools",
    "http.client", "inspect", "itertools", "logging", "math", "pathlib", "pickle", "random", "re", "statistics",
    "subprocess", "tarfile", "tempfile", "textwrap", "threading", "tokenize", "typing", "unittest.case", "zipfile",
)  # fmt: skip


@dataclass(frozen=True)
class Texts:
    """Token ids `[tokens]` int64 of each text, and what they are of.

    Attributes:
        source: of which Python.
        digest: sha256 of all token ids.
        modules: whose documentation they are.
    """

    ids: list[Tensor]
    source: str
    digest: str
    modules: tuple[str, ...]


def read_texts(tokenizer: Any, count: int, length: int) -> Texts:
    """The first `length` tokens of the documentation of the first modules that have so many, one text a module.

    Args:
        tokenizer: of the model that is measured.

    Raises:
        ValueError: fewer modules have so many.
    """
    found: dict[str, Tensor] = {}
    for name in MODULES:
        if len(found) == count:
            break
        ids = tokenizer(documentation(name), return_tensors="pt", verbose=False)["input_ids"][0]
        if len(ids) >= length:
            found[name] = ids[:length].clone()
    if len(found) < count:
        raise ValueError(
            f"{len(found)} of {len(MODULES)} modules have documentation of {length} tokens, and {count} are asked for; lower --texts or "
            f"--length"
        )
    digest = hashlib.sha256(torch.stack([*found.values()]).numpy().tobytes()).hexdigest()
    return Texts([*found.values()], f"docstrings of Python {platform.python_version()}", digest, tuple(found))


def calibration_text(measured: Texts) -> str:
    """The documentation of the modules of which no text is measured.

    Raises:
        ValueError: there is none.
    """
    others = [name for name in MODULES if name not in measured.modules]
    if not others:
        raise ValueError(
            f"all {len(MODULES)} modules are measured, and weights are to be rounded on others; lower --texts"
        )
    return "\n\n".join(map(documentation, others))


def documentation(name: str) -> str:
    """The docstrings of a module and of what it makes public, classes with their methods, in alphabetical order."""
    module = importlib.import_module(name)
    return "\n\n".join([_docstring(module) or name, *_members(module, name)])


def _members(owner: Any, path: str) -> Iterator[str]:
    public = getattr(owner, "__all__", None) if inspect.ismodule(owner) else None
    for name in sorted(public or (each for each in vars(owner) if not each.startswith("_"))):
        member = inspect.getattr_static(owner, name, None)
        inner = member.__func__ if isinstance(member, staticmethod | classmethod) else member
        if not (inspect.isclass(inner) or inspect.isroutine(inner)) or _is_elsewhere(inner, owner):
            continue
        text = _docstring(inner)
        if text:
            yield f"{path}.{name}\n{text}"
        if inspect.isclass(inner):
            yield from _members(inner, f"{path}.{name}")


def _is_elsewhere(member: Any, owner: Any) -> bool:
    """Whether a class is another module's, or would be told of for ever: only those of this one are walked into."""
    return inspect.isclass(member) and (
        not inspect.ismodule(owner) or member.__module__.lstrip("_") != owner.__name__.lstrip("_")
    )


def _docstring(member: Any) -> str:
    """Its own, none that is inherited."""
    text = member.__doc__
    return inspect.cleandoc(text) if isinstance(text, str) else ""
