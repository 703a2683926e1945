# SPDX-License-Identifier: Apache-2.0
"""The /commands of a chat, as a table: what each takes, what it does, and what it says."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from . import messages
from .session import ChatSession, Turn
from .settings import UNSET


MARK = "/"


class Said(NamedTuple):
    """What a command has to say, the turn that it took, if it took one, and whether the user leaves."""

    text: str
    turn: Turn | None = None
    leaves: bool = False


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        argument: what follows its name, in words for the help; empty where nothing may.
        optional: whether that may be left out.
        run: does it, with what followed the name, and a function that shows text of an answer.
    """

    argument: str
    help: str
    run: Callable[[ChatSession, str, Callable[[str], None]], Said]
    optional: bool = False

    @property
    def usage(self) -> str:
        return f"[{self.argument}]" if self.optional else self.argument


def run(session: ChatSession, line: str, show: Callable[[str], None]) -> Said:
    """Does what a line says that begins with a slash.

    Raises:
        ValueError: there is no such command, or it cannot be done so.
        OSError: a file cannot be read or written.
    """
    name, _, argument = line.strip().partition(" ")
    argument = argument.strip()
    command = COMMANDS.get(ALIASES.get(name, name))
    if command is None:
        near = difflib.get_close_matches(name, [*COMMANDS, *ALIASES], 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else "/help lists them"
        raise ValueError(f"{name} is no command; {hint} (a message that begins with a slash is written with two)")
    if argument and not command.argument:
        raise ValueError(f"{name} takes nothing, and {argument!r} follows it; leave it out")
    if command.argument and not argument and not command.optional:
        raise ValueError(f"{name} needs {command.argument}: {name} {command.argument}")
    return command.run(session, argument, show)


def help_text() -> str:
    """A line per command, and how to write messages."""
    names = {name: ", ".join([name, *(each for each, of in ALIASES.items() if of == name)]) for name in COMMANDS}
    usages = {f"{names[name]} {command.usage}".strip(): command.help for name, command in COMMANDS.items()}
    width = max(map(len, usages))
    return "\n".join([*(f"{usage:{width}}  {text}" for usage, text in usages.items()), "", WRITING])


WRITING = '''\
A line that ends with \\ goes on in the next one; """ begins a message of several lines, and ends it. Pasted lines are one message
where the terminal brackets what is pasted. A message that begins with a slash is written with two.
Ctrl-C ends an answer, and what there is of it stays in the history; at an empty prompt Ctrl-C and Ctrl-D leave.'''


def _help(session: ChatSession, argument: str, show: Callable[[str], None]) -> Said:
    return Said(help_text())


def _clear(session: ChatSession, argument: str, show: Callable[[str], None]) -> Said:
    session.clear()
    return Said("a new conversation" + (", with the same system message" if session.system else ""))


def _system(session: ChatSession, argument: str, show: Callable[[str], None]) -> Said:
    session.set_system(argument or None)
    what = "the system message is set" if argument else "there is no system message now"
    return Said(
        f"{what}; what follows it is computed again with your next message" if len(session.messages) > 1 else what
    )


def _retry(session: ChatSession, argument: str, show: Callable[[str], None]) -> Said:
    turn = session.retry(show)
    return Said(
        "at temperature 0 an answer is always the same; /set temperature 0.7 draws others"
        if session.is_greedy
        else "",
        turn,
    )


def _undo(session: ChatSession, argument: str, show: Callable[[str], None]) -> Said:
    return Said(f"taken back: {session.undo()}")


def _save(session: ChatSession, argument: str, show: Callable[[str], None]) -> Said:
    messages.save(session.messages, Path(argument).expanduser())
    return Said(f"{len(session.messages)} messages in {argument}")


def _load(session: ChatSession, argument: str, show: Callable[[str], None]) -> Said:
    session.replace(messages.load(Path(argument).expanduser()))
    return Said(f"{len(session.messages)} messages from {argument}; they are computed with your next message")


def _stats(session: ChatSession, argument: str, show: Callable[[str], None]) -> Said:
    totals, said = session.totals, sum(message["role"] == "user" for message in session.messages)
    return Said(
        f"this conversation: {said} messages of yours, {session.system!r} as the system message\n"
        f"all turns: {totals.turns}, with {totals.computed:,} tokens computed, {totals.reused:,} reused and "
        f"{totals.generated:,} generated\n"
        f"{session.kept}\n{_settings(session)}"
    )


def _set(session: ChatSession, argument: str, show: Callable[[str], None]) -> Said:
    if argument:
        name, _, value = argument.replace("=", " ", 1).partition(" ")
        if not value.strip():
            raise ValueError(f"/set {name} needs a value: /set {name} VALUE, or /set {name} {UNSET}")
        session.change_settings(session.settings.with_value(name, value.strip()))
    return Said(_settings(session))


def _settings(session: ChatSession) -> str:
    return ", ".join(f"{name} {value}" for name, value in session.settings.told().items())


def _exit(session: ChatSession, argument: str, show: Callable[[str], None]) -> Said:
    return Said("", leaves=True)


COMMANDS = {
    "/help": Command("", "list these", _help),
    "/clear": Command("", "begin a new conversation", _clear),
    "/system": Command("TEXT", "set the system message; without TEXT there is none", _system, optional=True),
    "/retry": Command("", "answer your last message again", _retry),
    "/undo": Command("", "take your last message and its answer back", _undo),
    "/save": Command("FILE", "write the messages to a new JSON file", _save),
    "/load": Command("FILE", "go on with the messages of such a file", _load),
    "/stats": Command("", "tell what was computed and what was reused", _stats),
    "/set": Command("NAME VALUE", "change max-new-tokens, temperature, top-k, top-p or seed; without both, list them", _set, optional=True),
    "/exit": Command("", "leave", _exit),
}  # fmt: skip
ALIASES = {"/reset": "/clear", "/quit": "/exit"}
