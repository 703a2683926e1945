# SPDX-License-Identifier: Apache-2.0
"""Where a user writes and reads: lines with history and editing on a terminal, plain lines from a pipe."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import NamedTuple

from ..cli import console


QUOTES = '"""'
_PROMPT, _MORE = "> ", ". "
# What would move the cursor or change colors is shown as what it is not: an answer is no program for a terminal.
_HARMLESS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


class Entry(NamedTuple):
    """What the user wrote, and whether it stood in quotes, where a slash begins no command."""

    text: str
    is_quoted: bool = False


class Terminal:
    """stdin, stdout for answers, and stderr for all else.

    Attributes:
        is_interactive: whether a person types, who sees prompts and may try again; else lines come from a file or a program.
    """

    def __init__(self, completions: list[str]) -> None:
        self.is_interactive = sys.stdin.isatty()
        self._shown = console(stderr=True)
        self._readline = _readline(completions) if self.is_interactive and sys.stdout.isatty() else None
        self._ended_line = True
        self._typed = self._reads = False
        self._interrupts = 0

    def read(self) -> Entry | None:
        """The next message or command; None at the end.

        Raises:
            ValueError: a message in quotes has no end.
        """
        while True:
            try:
                self._interrupts, self._reads = 0, True
                return self._entry(self._line(_PROMPT))
            except EOFError:
                self._newline()
                return None
            except KeyboardInterrupt:
                if not self.is_interactive:
                    raise
                self._newline()
                if not self._typed:
                    return None
            finally:
                self._reads = False

    def _entry(self, line: str) -> Entry:
        if line.lstrip().startswith(QUOTES):
            return Entry(self._quoted(line.lstrip().removeprefix(QUOTES)), is_quoted=True)
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            try:
                lines.append(self._line(_MORE))
            except EOFError:
                break
        return Entry("\n".join(lines).strip())

    def _quoted(self, line: str) -> str:
        lines = [line]
        while not lines[-1].rstrip().endswith(QUOTES):
            try:
                lines.append(self._line(_MORE))
            except EOFError:
                raise ValueError(f"the message that {QUOTES} begins has no end; write {QUOTES} behind it") from None
        lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
        return "\n".join(lines).strip()

    def _line(self, prompt: str) -> str:
        self._typed = prompt == _MORE  # then there is something to give up
        if self._readline is not None:
            try:
                return input(f"\001\033[1m\002{prompt}\001\033[0m\002")
            except KeyboardInterrupt:
                self._typed = self._typed or bool(self._readline.get_line_buffer())
                raise
        if self.is_interactive:
            sys.stderr.write(prompt)
            sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    @contextmanager
    def interrupts(self, end: Callable[[], None]) -> Iterator[None]:
        """Has Ctrl-C call `end` while nothing is read; a second one before the next line raises KeyboardInterrupt, as where `end`
        has no effect. Where nobody types it raises at once."""

        def handle(number: int, frame: FrameType | None) -> None:
            self._interrupts += 1
            if self._reads or self._interrupts > 1:
                raise KeyboardInterrupt
            end()

        if not self.is_interactive:
            yield
            return
        before = signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _newline(self) -> None:
        if self.is_interactive:
            sys.stderr.write("\n")

    def show(self, piece: str) -> None:
        """Shows the next part of an answer."""
        if piece:
            self._ended_line = piece.endswith("\n")
            sys.stdout.write(piece.translate(_HARMLESS) if sys.stdout.isatty() else piece)
            sys.stdout.flush()

    def end_answer(self) -> None:
        """Ends an answer's last line."""
        if not self._ended_line:
            self.show("\n")

    def tell(self, text: str) -> None:
        """Says something beside the answers."""
        self._shown.print(text, style="dim", soft_wrap=True)

    def tell_error(self, error: BaseException) -> None:
        """Says what went wrong, in the form of all commands."""
        self._shown.print(f"error: {' '.join(str(error).split())}", soft_wrap=True)


def _readline(completions: list[str]) -> ModuleType | None:
    """Line editing and history, where Python has it; its own import is what makes input() use it."""
    try:
        import readline
    except ImportError:  # as on Windows
        return None
    if "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")  # lines that are pasted come as one
        readline.parse_and_bind("tab: complete")
    readline.set_completer_delims(" \n")

    def complete(text: str, state: int) -> str | None:
        found = [each for each in completions if text and each.startswith(text)]
        return found[state] if state < len(found) else None

    readline.set_completer(complete)
    return readline
