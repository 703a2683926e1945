# SPDX-License-Identifier: Apache-2.0
"""neuron_text.json: what an export notes of its tokenizer, so that a process without transformers has the same one.

Transformers builds a tokenizer from several files by rules of its class. The export has it built once, and notes the result.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..artifact.artifact import ArtifactError
from ..artifact.schema import anything, choice, read_object, record


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


RECORD_NAME = "neuron_text.json"
# The checkpoint's own file, and the one that an export writes where transformers changes the first.
_OWN, _BUILT = "tokenizer.json", "neuron_tokenizer.json"
# Methods that a tokenizer's class may have of its own. Then the `tokenizers` library alone does not do the same.
_METHODS = (
    "__call__", "_encode_plus", "_decode", "decode", "apply_chat_template", "get_chat_template", "convert_ids_to_tokens", "get_vocab",
)  # fmt: skip
_CHECK = record({"file": choice((_OWN, _BUILT)), "special_tokens": anything, "chat_template": anything}, closed=True)


@dataclass(frozen=True)
class TextRecord:
    """A tokenizer as transformers builds it.

    Attributes:
        file: holds the tokenizer of the `tokenizers` library.
        special_tokens: by name, as templates use them.
        chat_template: one, several by name, or None.
    """

    file: str
    special_tokens: dict[str, Any] = field(default_factory=dict)
    chat_template: str | dict[str, str] | None = None


def write_record(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Note an artifact's tokenizer, unless only transformers can do what it does.

    Args:
        tokenizer: as transformers loads it from the folder.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    own = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or any(
        getattr(own, name) is not getattr(PreTrainedTokenizerFast, name) for name in _METHODS
    ):
        return
    backend = tokenizer.backend_tokenizer
    cleans = tokenizer.clean_up_tokenization_spaces and type(backend.model).__name__ != "BPE"
    if cleans or tokenizer.split_special_tokens:
        return
    built = Tokenizer.from_str(backend.to_str())
    built.no_truncation()
    built.no_padding()
    file = _OWN
    if not (folder / _OWN).is_file() or _plain_form(Tokenizer.from_file(str(folder / _OWN))) != _plain_form(built):
        file = _BUILT
        built.save(str(folder / _BUILT))
    noted = TextRecord(file, tokenizer.special_tokens_map, tokenizer.chat_template)
    (folder / RECORD_NAME).write_text(json.dumps(asdict(noted), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _plain_form(tokenizer: Any) -> str:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    text: str = tokenizer.to_str()
    return text


def read_record(folder: Path) -> TextRecord | None:
    """Return what the export of an artifact noted; None where it noted nothing.

    Raises:
        ArtifactError: the file holds something else.
    """
    path = folder / RECORD_NAME
    if not path.is_file():
        return None
    try:
        found = read_object(path)
        _CHECK("it", found)
        template, tokens = found["chat_template"], found["special_tokens"]
        texts = template.values() if isinstance(template, dict) else () if template is None else (template,)
        if not isinstance(tokens, dict) or not all(isinstance(each, str) for each in texts):
            raise ValueError("its special_tokens are no object, or its chat_template is no text")
    except ValueError as error:
        raise ArtifactError(f"{path} cannot be read: {error}; export the model again") from error
    return TextRecord(**found)
