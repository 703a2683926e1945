# SPDX-License-Identifier: Apache-2.0
"""TextTokenizer: an artifact's tokenizer with its chat template, equal to transformers' own, without transformers.

Transformers builds a tokenizer from several files by rules of its class. The export has it built once, and notes the result in
neuron_text.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from ..arrays import give_back_heap
from ..artifact.artifact import ArtifactError
from ..artifact.schema import anything, choice, read_object, record
from ..errors import first_line
from .template import Message, render_chat


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
    """A tokenizer as transformers builds it: the file of the `tokenizers` library, and what templates use."""

    file: str
    special_tokens: dict[str, Any] = field(default_factory=dict)
    chat_template: str | dict[str, str] | None = None


def write_record(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Note an artifact's tokenizer, as transformers loads it from the folder, unless only transformers can do what it does."""
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
    built = _without_limits(Tokenizer.from_str(backend.to_str()))
    own_file, file = folder / _OWN, _OWN
    if not own_file.is_file() or _without_limits(Tokenizer.from_file(str(own_file))).to_str() != built.to_str():
        file = _BUILT
        built.save(str(folder / _BUILT))
    noted = TextRecord(file, tokenizer.special_tokens_map, tokenizer.chat_template)
    (folder / RECORD_NAME).write_text(json.dumps(asdict(noted), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _without_limits(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_record(folder: Path) -> TextRecord | None:
    """Return what an artifact's export noted, None where it noted nothing; raise ArtifactError for another file."""
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


class TextTokenizer:
    """A tokenizer. Its methods have the names and results of transformers' tokenizers.

    Attributes:
        name_or_path: the artifact's folder.
        chat_template: one, several by name, or None.
        special_tokens_map: special tokens by name.
    """

    def __init__(self, backend: Tokenizer, noted: TextRecord, name: str) -> None:
        self._backend = backend
        self.name_or_path = name
        self.chat_template = noted.chat_template
        self.special_tokens_map = noted.special_tokens

    def __deepcopy__(self, memo: dict[int, Any]) -> TextTokenizer:
        """Return itself: no method changes anything, so all threads may use one vocabulary."""
        return self

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Return the token ids of a text as `input_ids`."""
        return {"input_ids": self._backend.encode(text, add_special_tokens=add_special_tokens).ids}

    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Return the text of tokens. A tokenizer with texts that `clean_up_tokenization_spaces` changes has no record."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        """Return a token's name in the vocabulary."""
        return self._backend.id_to_token(token_id)

    def get_vocab(self) -> dict[str, int]:
        """Return all tokens with their ids."""
        return self._backend.get_vocab(with_added_tokens=True)

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        documents: Sequence[dict[str, str]] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        return_dict: bool = True,
        **values: Any,
    ) -> Any:
        """Return a conversation as `input_ids`, as a list of these without `return_dict`, or as text without `tokenize`.

        Raises ValueError if there are no messages, or no template, or both the last message and a new one are to be
        written; TemplateError if the template refuses the messages.
        """
        if not conversation:
            raise ValueError("the conversation is empty; give at least one message")
        if continue_final_message and add_generation_prompt:
            raise ValueError(
                "continue_final_message continues the last message, and add_generation_prompt begins a new one; give one of them"
            )
        given = {"tools": tools, "documents": documents, "add_generation_prompt": add_generation_prompt}
        text = render_chat(
            self._choose_template(has_tools=tools is not None),
            conversation,
            {**self.special_tokens_map, **values, **given},
            continues_last=continue_final_message,
        )
        if not tokenize:
            return text
        ids = self(text, add_special_tokens=False)
        return ids if return_dict else ids["input_ids"]

    def _choose_template(self, *, has_tools: bool) -> str:
        if isinstance(self.chat_template, str):
            return self.chat_template
        named = self.chat_template or {}
        found = named.get("tool_use") if has_tools else None
        found = found or named.get("default")
        if found is None:
            known = f"templates {', '.join(sorted(named))}, and none by default" if named else "no chat template"
            raise ValueError(f"{self.name_or_path} has {known}; add a chat_template.jinja and export the model again")
        return found


def open_tokenizer(folder: Path) -> TextTokenizer | None:
    """Return an artifact's tokenizer; None where only transformers can make it.

    Its files are verified by then. Raises ArtifactError if they cannot be read.
    """
    noted = read_record(folder)
    if noted is None:
        return None
    path = folder / noted.file
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ArtifactError(f"{path} cannot be read: {first_line(error)}; export the model again") from error
    give_back_heap()  # reading a vocabulary takes some times what it keeps: 29 MB for one of 49,152 tokens
    return TextTokenizer(_without_limits(backend), noted, str(folder))
