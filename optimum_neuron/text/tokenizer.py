# SPDX-License-Identifier: Apache-2.0
"""TextTokenizer: an artifact's tokenizer with its chat template, equal to transformers' own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..artifact.artifact import ArtifactError
from ..errors import first_line
from .record import TextRecord, read_record
from .template import Message, render_chat


class TextTokenizer:
    """A tokenizer. Its methods have the names and results of transformers' tokenizers.

    Attributes:
        name_or_path: the artifact's folder.
        chat_template: one, several by name, or None.
        special_tokens_map: special tokens by name.
    """

    def __init__(self, backend: Tokenizer, record: TextRecord, name: str) -> None:
        self._backend = backend
        self.name_or_path = name
        self.chat_template = record.chat_template
        self.special_tokens_map = record.special_tokens

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Return the token ids of a text as `input_ids`."""
        return {"input_ids": self._backend.encode(text, add_special_tokens=add_special_tokens).ids}

    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Return the text of tokens.

        Args:
            clean_up_tokenization_spaces: taken for transformers' sake. A tokenizer with texts that it changes has no record.
        """
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

        Raises:
            ValueError: there are no messages, or no template, or both the last message and a new one are to be written.
            TemplateError: the template refuses the messages.
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

    Args:
        folder: of an artifact with verified files.

    Raises:
        ArtifactError: its files cannot be read.
    """
    record = read_record(folder)
    if record is None:
        return None
    path = folder / record.file
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise ArtifactError(f"{path} cannot be read: {first_line(error)}; export the model again") from error
    backend.no_truncation()
    backend.no_padding()
    return TextTokenizer(backend, record, str(folder))
