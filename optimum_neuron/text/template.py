# SPDX-License-Identifier: Apache-2.0
"""Chat templates, rendered as transformers renders them: by jinja2, in a sandbox."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


Message = Mapping[str, Any]
# Stands after the last message, which the answer continues. A template may strip the blank at its end.
_MARK = "\ue000optimum-neuron continues here\ue000 "


class _Answers(Extension):
    """Blocks `{% generation %}`, which name the answers of a text to a trainer. Their text stays as it is."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _write_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


@lru_cache(maxsize=16)
def _compile_template(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Answers, loopcontrols]
    )
    environment.filters["tojson"] = _write_json  # jinja2's own escapes characters of HTML
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(source)


def render_chat(
    source: str, messages: Sequence[Message], values: Mapping[str, Any], *, continues_last: bool = False
) -> str:
    """Return the text of a conversation.

    Args:
        source: the template.
        values: other names that the template may use.
        continues_last: end the text where the content of the last message ends.

    Raises TemplateError if the template cannot be read, or refuses the messages; ValueError if the last message
    cannot be continued.
    """
    template = _compile_template(source)
    if not continues_last:
        return template.render(messages=messages, **values)
    text = template.render(messages=_mark_last(messages), **values)
    place = text.rfind(_MARK.strip())
    if place < 0:
        raise ValueError(
            "the template leaves out the message to continue; let the answer begin with a message of its own"
        )
    return text[:place] if text.startswith(_MARK, place) else text[:place].rstrip()


def _mark_last(messages: Sequence[Message]) -> list[Any]:
    """Return the messages with a mark after the text of the last one."""
    marked: list[Any] = copy.deepcopy(list(messages))
    content = marked[-1].get("content")
    if isinstance(content, str):
        marked[-1]["content"] = content + _MARK
        return marked
    part = next((each for each in reversed(content or ()) if "text" in each), None)
    if part is None:
        raise ValueError("the last message has no text to continue; give it one, or let a new answer begin")
    part["text"] += _MARK
    return marked
