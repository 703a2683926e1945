# SPDX-License-Identifier: Apache-2.0
"""The dialogue with a user: lines become messages or commands, and answers go to the screen, until the user leaves."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from ...cli import console
from ...engine.service import EngineStoppedError
from .session import ChatSession


QUOTES = '"""'
HELP = '''\
/help              list these
/clear, /reset     begin a new conversation, with the same system message
/system [TEXT]     set the system message; without TEXT there is none
/exit, /quit       leave

Write """ before and after a message of several lines, or one that begins with a slash.
Ctrl-C ends an answer, which stays in the history as far as it came. Ctrl-D leaves.'''
# Characters that move a cursor or change colors are shown as one that does neither.
_HARMLESS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


class Terminal:
    """Lines from stdin, answers to stdout, and all else to stderr."""

    def __init__(self) -> None:
        self.is_interactive = sys.stdin.isatty()  # a person types, who sees prompts and may try again
        self._edits = self.is_interactive and sys.stdout.isatty()
        if self._edits:
            with suppress(ImportError):  # as on Windows
                importlib.import_module("readline")  # gives input() a history and editing
        self._notes = console(stderr=True)
        self._ended_line = True

    def read_input(self) -> tuple[str, bool]:
        """Return the next message or command, and whether quotes make it a message; raise ValueError where quotes have no end."""
        text = self._read_line("> ").strip()
        if not text.startswith(QUOTES):
            return text, False
        text = text.removeprefix(QUOTES)
        while not text.endswith(QUOTES):
            try:
                text += "\n" + self._read_line(". ").rstrip()
            except EOFError:
                raise ValueError(f"the message that {QUOTES} begins has no end; write {QUOTES} after it") from None
        return text.removesuffix(QUOTES).strip(), True

    def _read_line(self, prompt: str) -> str:
        if self._edits:
            return input(prompt)
        self.show_prompt(prompt)
        return input()

    def show_prompt(self, text: str) -> None:
        if self.is_interactive:
            sys.stderr.write(text)
            sys.stderr.flush()

    @contextmanager
    def handle_interrupts(self, end: Callable[[], None]) -> Iterator[None]:
        """Have Ctrl-C call `end`; the next one raises KeyboardInterrupt, as the first does where no person types."""
        before = signal.getsignal(signal.SIGINT)

        def handle_signal(number: int, frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, before)
            end()

        if self.is_interactive:
            signal.signal(signal.SIGINT, handle_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def show_piece(self, piece: str) -> None:
        if piece:
            self._ended_line = piece.endswith("\n")
            sys.stdout.write(piece.translate(_HARMLESS) if sys.stdout.isatty() else piece)
            sys.stdout.flush()

    def show_note(self, text: str) -> None:
        """End the line of an answer, and write something else after it."""
        if not self._ended_line:
            self.show_piece("\n")
        self._notes.print(text, style="dim", soft_wrap=True)


def run_chat(session: ChatSession, terminal: Terminal) -> None:
    """Answer messages and obey commands until the user leaves. Errors of a line are raised where no person can write another."""
    leaves = False
    while not leaves:
        try:
            text, is_quoted = terminal.read_input()
            leaves = bool(text) and _obey_input(session, terminal, text, is_quoted=is_quoted)
        except EOFError:
            leaves = True
            terminal.show_prompt("\n")
        except KeyboardInterrupt:
            if not terminal.is_interactive:
                raise
            terminal.show_prompt("\n")
        except (ValueError, OSError, RuntimeError) as error:
            if not terminal.is_interactive or isinstance(error, EngineStoppedError | BrokenPipeError):
                raise
            terminal.show_note(f"error: {' '.join(str(error).split())}")


def _obey_input(session: ChatSession, terminal: Terminal, text: str, *, is_quoted: bool) -> bool:
    """Answer a message or obey a command; return whether the user leaves."""
    name, _, argument = text.partition(" ")
    argument = argument.strip()
    with terminal.handle_interrupts(session.interrupt_answer):
        match name, argument:
            case _ if is_quoted or not name.startswith("/"):
                note = str(session.send_message(text, terminal.show_piece))
            case "/help", "":
                note = HELP
            case "/clear" | "/reset", "":
                session.messages = []
                note = "a new conversation" + (", with the same system message" if session.system else "")
            case "/system", _:
                session.system = argument or None
                note = "the system message is set" if argument else "there is no system message now"
            case "/exit" | "/quit", "":
                return True
            case _:
                raise ValueError(
                    f"{text} is no command; /help lists them, and {QUOTES} before and after it make it a message"
                )
    terminal.show_note(note)
    return False
