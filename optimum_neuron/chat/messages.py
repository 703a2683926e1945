# SPDX-License-Identifier: Apache-2.0
"""The messages of a conversation, and the file that keeps them: {"messages": [{"role": ..., "content": ...}, ...]}."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..artifacts.schema import read_object


ROLES = ("system", "user", "assistant")
Message = dict[str, str]


def check_messages(messages: Sequence[Any]) -> None:
    """Raises ValueError where messages are not texts by the user and the assistant in any order, behind at most one of the system."""
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise ValueError(f"messages[{number}] is no object of role and content alone")
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise ValueError(f"messages[{number}] has the role {role!r}; give one of {', '.join(ROLES)}")
        if role == "system" and number:
            raise ValueError(f"messages[{number}] has the role 'system', which only the first may have")
        if not isinstance(content, str):
            raise ValueError(f"the content of messages[{number}] is no text")
        try:
            content.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError(f"the content of messages[{number}] is no text: it has bytes that are no UTF-8") from None


def save(messages: Sequence[Message], path: Path) -> None:
    """Writes messages to a new file.

    Raises:
        FileExistsError: there is one.
        OSError: it cannot be written; nothing stays of it.
    """
    text = json.dumps({"messages": list(messages)}, indent=2, ensure_ascii=False) + "\n"
    try:
        file = path.open("x", encoding="utf-8")
    except FileExistsError:
        raise FileExistsError(f"{path} exists already; name another file, or remove it") from None
    try:
        with file:
            file.write(text)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def load(path: Path) -> list[Message]:
    """Reads what `save` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds no messages.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file; name one that /save wrote")
    try:
        messages = read_object(path).get("messages")
        if not isinstance(messages, list):
            raise ValueError("it has no list of messages")
        check_messages(messages)
    except ValueError as error:
        raise ValueError(f"{path} holds no conversation: {error}") from error
    return messages
