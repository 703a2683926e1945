# SPDX-License-Identifier: Apache-2.0
"""The model card of an artifact: card.md, filled in. Text of an artifact stands in code, where it is only text."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ..artifact.artifact import Artifact
from ..artifact.filesystem import replace_file
from ..checkpoints.origin import CARD_NAME
from .collect import read_facts
from .facts import ArtifactFacts, bytes_text


LIBRARY = "optimum-neuron-runtime"
_TAGS = ("neuron", "optimum", "text-generation")
_MARK = "<!-- made by optimum-neuron-runtime from the artifact; sha256 of what stands above: "
_MARK_END = " -->\n"
_LONGEST = 200


def make_card(
    facts: ArtifactFacts,
    *,
    repo_id: str | None = None,
    base_model: str | None = None,
    tags: Sequence[str] | None = None,
) -> str:
    """Return the card as Markdown; its last line proves it unchanged. `base_model` is by default the repository that the export read.

    Raise ValueError where that is no name of a repository.
    """
    try:
        validate_repo_id(base_model or "org/name")
    except HFValidationError as error:
        raise ValueError(f"base_model={base_model!r} is no name of a Hub repository; write org/name") from error
    base = base_model or facts.origin.get("repo")
    bounds = facts.certificate.comparisons if facts.certificate else ()
    environment = Environment(finalize=_show_value, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {
        "block": _fence_block,
        "bytes": lambda size: Markup(bytes_text(size) if size else "-"),
        "form": lambda value, form: Markup(format(value, form)),
        "quote": lambda text: Markup(shlex.quote(text)),
    }
    template = environment.from_string(files(__package__).joinpath("card.md").read_text(encoding="utf-8"))
    body = template.render(
        facts=facts,
        name=repo_id or facts.name,
        base=base,
        library=LIBRARY,
        cores=facts.options["tensor_parallel_size"],
        versions={**facts.exported_with, **facts.compiled_with},
        nearest=max((each.difference / (each.bound or 1) for each in bounds), default=0.0),
    )
    return add_mark(f"---\n{_card_metadata(facts, base, tags or ())}\n---\n\n" + re.sub(r"\n{3,}", "\n\n", body))


def _card_metadata(facts: ArtifactFacts, base: str | None, tags: Sequence[str]) -> str:
    options, own = facts.options, [facts.target, facts.options["dtype"]]
    if facts.quantized:
        own.append((options["quantization"] or "checkpoint").replace("checkpoint", facts.quantized[0].kind))
    if options["activations"]:
        own.append(f"{options['activations']}-activations")
    data: dict[str, Any] = {
        "library_name": LIBRARY,
        "pipeline_tag": "text-generation",
        **{name: facts.origin.get(name) for name in ("license", "license_name", "license_link", "language")},
        "base_model": base,
        "base_model_relation": "quantized" if base and facts.quantized else None,
        "tags": list(dict.fromkeys([*_TAGS, *own, *tags])),
    }
    return ModelCardData(**data).to_yaml()


def _show_value(value: object) -> object:
    """Return numbers and Markdown as they are, and any other text as code within a line or a cell of a table."""
    if value is None:
        return "-"
    if isinstance(value, Markup | int):
        return value if isinstance(value, Markup) else f"{value:,}"
    text = "".join(letter for letter in str(value) if letter.isprintable())
    text = text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
    if not text.strip():
        return "-"
    fence = "`" * (_longest_ticks(text) + 1)
    padding = " " if text[0] in "` " or text[-1] in "` " else ""
    # A cell ends at a bar, also in code; an escaped one would keep its backslash elsewhere.
    return f"{fence}{padding}{text.replace('|', '│')}{padding}{fence}"


def _fence_block(text: str, language: str) -> Markup:
    printed = "\n".join("".join(filter(str.isprintable, line)) for line in text.strip().split("\n"))
    fence = "`" * max(3, _longest_ticks(printed) + 1)
    return Markup(f"{fence}{language}\n{printed}\n{fence}")


def _longest_ticks(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def add_mark(text: str) -> str:
    return f"{text}\n{_MARK}{hashlib.sha256(text.encode()).hexdigest()}{_MARK_END}"


def is_unchanged(card: str) -> bool:
    """Return whether a card was made here and not changed since: only such a card may be replaced."""
    card = card.replace("\r\n", "\n")
    return card == add_mark(card.rpartition(_MARK)[0].removesuffix("\n"))


def own_words(path: Path) -> str | None:
    """Return a README.md that a person wrote or changed, if there is one; raise ValueError where it is no text."""
    if not path.is_file():
        return None
    try:
        card = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text; correct or remove it") from error
    return None if is_unchanged(card) else card


def write_card(
    artifact: Artifact,
    *,
    base_model: str | None = None,
    tags: Sequence[str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write README.md into the artifact's folder, whole or not at all.

    Raise FileExistsError where a person wrote the one that is there, and not `overwrite`; ArtifactError where a file was changed after the export.
    """
    path = artifact.path / CARD_NAME
    if not overwrite and own_words(path) is not None:
        raise FileExistsError(
            f"{path} was written or changed by hand; pass --overwrite (overwrite=True) to replace it, or move it"
        )
    replace_file(path, make_card(read_facts(artifact), base_model=base_model, tags=tags))
    return path
