# SPDX-License-Identifier: Apache-2.0
"""From a line that is read to an answer that is shown, until the user leaves."""

from __future__ import annotations

from ..engine.service import EngineStoppedError
from . import commands
from .session import ChatSession, Turn
from .terminal import Entry, Terminal


# What is wrong with one line, and lets the next one be right.
_OF_ONE_LINE = (ValueError, OSError, RuntimeError)


def chat(session: ChatSession, terminal: Terminal) -> None:
    """Answers messages and obeys commands until their end.

    Raises:
        ValueError, OSError, RuntimeError: a line was wrong, and nobody is there to write another.
        EngineStoppedError: nothing can be computed any more.
    """
    with terminal.interrupts(session.interrupt):
        _converse(session, terminal)


def _converse(session: ChatSession, terminal: Terminal) -> None:
    while True:
        try:
            entry = terminal.read()
            if entry is None or (entry.text and _obey(session, terminal, entry)):
                return
        except EngineStoppedError:
            raise
        except _OF_ONE_LINE as error:
            terminal.end_answer()
            if not terminal.is_interactive or isinstance(error, BrokenPipeError):
                raise
            terminal.tell_error(error)


def _obey(session: ChatSession, terminal: Terminal, entry: Entry) -> bool:
    """Answers a message or does what a command says; whether the user leaves."""
    text = entry.text
    is_command = text.startswith(commands.MARK) and not entry.is_quoted
    doubled = is_command and text.startswith(2 * commands.MARK)
    if is_command and not doubled:
        said = commands.run(session, text, terminal.show)
    else:
        said = commands.Said("", session.send(text[doubled:], terminal.show))
    terminal.end_answer()
    if said.text:
        terminal.tell(said.text)
    if said.turn is not None:
        terminal.tell(told(session, said.turn))
    return said.leaves


def told(session: ChatSession, turn: Turn) -> str:
    """A turn's counts and speeds in a line."""
    if turn.ttft_seconds is None:
        return f"not answered, so your message is not kept; {turn.computed:,} tokens of it were computed"
    parts = [
        f"{turn.computed:,} tokens computed, {turn.reused:,} reused",
        f"TTFT {turn.ttft_seconds * 1000:,.0f} ms",
        f"{turn.generated:,} new tokens"
        + (f" at {turn.tokens_per_second:,.1f} tok/s" if turn.tokens_per_second else ""),
        f"room for {turn.room:,} more",
    ]
    if turn.ending == "abort":
        parts.append("interrupted")
    elif turn.ending == "length":
        limit = "the slot is full: /undo or /clear" if not turn.room else "cut at max-new-tokens: /set max-new-tokens"
        parts.append(limit)
    return ", ".join(parts)
