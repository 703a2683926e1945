# SPDX-License-Identifier: Apache-2.0
"""What is read from a terminal or a pipe, what is shown, and what Ctrl-C ends."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from optimum.commands import optimum_cli

from optimum_neuron.tools.chat.loop import Terminal


def entries(monkeypatch: pytest.MonkeyPatch, text: str) -> list[tuple[str, bool]]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    terminal, found = Terminal(), []
    with contextlib.suppress(EOFError):
        while True:
            found.append(terminal.read_input())
    return found


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("a\n\nb", ["a", "", "b"]),
        ("  /help  \n", ["/help"]),
        ('"""one\n\n  two"""\nthree\n', ["one\n\n  two", "three"]),
        ('""" one """  \n', ["one"]),
        ('"""\n/usr\n"""\n', ["/usr"]),
        ('say """ twice\n', ['say """ twice']),
    ],
)
def test_messages_of_one_line_and_of_several(text: str, read: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = entries(monkeypatch, text)
    assert [entry for entry, _ in found] == read
    assert found[0][1] == text.startswith('"""')


def test_a_message_in_quotes_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="has no end"):
        entries(monkeypatch, '"""one\ntwo\n')


def test_an_answer_moves_no_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, file = io.StringIO(), io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    for out in (screen, file):
        monkeypatch.setattr(sys, "stdout", out)
        terminal = Terminal()
        terminal.show_piece("a\x1b[2J\tb\r\n\x9b")
        terminal.show_note("")
    assert screen.getvalue() == "a\ufffd[2J\tb\ufffd\n\ufffd\n"
    assert file.getvalue() == "a\x1b[2J\tb\r\n\x9b\n"


def chat(monkeypatch: pytest.MonkeyPatch, artifact: Path, lines: str, *options: str) -> object:
    """Return the exit code of a chat that reads its lines from a pipe."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    monkeypatch.setattr(sys, "argv", ["optimum-cli", "neuron", "chat", str(artifact), *options])
    try:
        optimum_cli.main()
    except SystemExit as ended:
        return ended.code
    return 0


def test_lines_from_a_pipe_are_answered_and_obeyed(
    cpu_artifact: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = 'a\n/help\n/system Be  brief.\n/set temperature=0.5\n/reset\n"""/b"""\n/exit\nnever read\n'
    assert chat(monkeypatch, cpu_artifact("llama"), lines, "--max-new-tokens", "3") == 0
    out, err = capsys.readouterr()
    counted, *helped, system, settings, cleared, answered = err.splitlines()
    assert counted.startswith("19 tokens computed, 0 reused, TTFT ") and "3 new tokens at" in counted
    assert counted.endswith("room for 42 more, cut at max-new-tokens: /set max-new-tokens")
    for name in ("/clear, /reset", "/system", "/set", "/exit, /quit", '"""', "Ctrl-C"):
        assert name in "\n".join(helped)
    assert (system, cleared) == ("the system message is set", "a new conversation, with the same system message")
    assert settings == "max-new-tokens 3, temperature 0.5, top-k none, top-p none, seed none"
    assert answered.startswith("39 tokens computed, ") and not out.startswith(">")


def test_a_wrong_line_from_a_pipe_ends_the_chat(
    cpu_artifact: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, cpu_artifact("llama"), f"{'x' * 80}\na\n") == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "has 98 tokens with this message, and a slot holds sequence_length=64" in err


# Steps that a test can follow and interrupt: each leaves a mark.
SLOW_CHAT = """
import sys, time
from optimum_neuron.engine.engine import Engine
step = Engine.step
def slow(self):
    events = step(self)
    sys.stderr.write("~" * len(events))
    time.sleep(0.05)
    return events
Engine.step = slow
from optimum.commands import optimum_cli
sys.argv = ["optimum-cli", "neuron", "chat", *sys.argv[1:]]
optimum_cli.main()
"""


class Screen:
    """A process at a terminal of its own, whose keys are pressed and whose screen is read."""

    def __init__(self, script: str, *arguments: str | Path) -> None:
        self._pid, self._terminal = pty.fork()
        if not self._pid:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # what a shell starts in the background ignores it
            os.execve(
                sys.executable, [sys.executable, "-c", script, *map(str, arguments)], {**os.environ, "TERM": "xterm"}
            )
        self.seen = ""
        self._place = 0

    def wait(self, text: str) -> None:
        """Until a text comes behind the one that was waited for before."""
        while text not in self.seen[self._place :]:
            assert self._read(), f"ended without {text!r}: {self.seen!r}"
        self._place = self.seen.index(text, self._place) + len(text)

    def press(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def end(self) -> int:
        """Reads on to the end of the process; its exit code."""
        while self._read():
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def _read(self) -> bool:
        """Waits for more; False at the end of the process.

        Python sees a Ctrl-C that comes just before it waits for a key only at its next signal: so it is told each second that the
        window has a new size.
        """
        for _ in range(120):
            if select.select([self._terminal], [], [], 1)[0]:
                try:
                    data = os.read(self._terminal, 4096)
                except OSError:  # how Linux tells that nobody has the other side
                    return False
                self.seen += data.decode(errors="replace")
                return bool(data)
            os.kill(self._pid, signal.SIGWINCH)
        os.kill(self._pid, signal.SIGKILL)
        raise AssertionError(f"nothing comes behind {self.seen!r}")


def test_ctrl_c_ends_an_answer_or_a_line_and_ctrl_d_the_chat(cpu_artifact: Callable[[str], Path]) -> None:
    prompt = "> "
    screen = Screen(SLOW_CHAT, cpu_artifact("llama"), "--max-new-tokens", "40")
    screen.wait("loading ")
    screen.wait("loaded in ")
    screen.wait(prompt)
    screen.press("a\n")
    screen.wait("~~~")
    screen.press("\x03")
    screen.wait("interrupted")
    screen.wait(prompt)
    screen.press("half a line")
    screen.wait("line")
    screen.press("\x03")
    screen.wait(prompt)
    screen.press("/nothing\n")
    screen.wait("is no command")
    screen.wait(prompt)
    screen.press("b\n")
    screen.wait("reused")
    screen.wait(prompt)
    screen.press("\x04")
    assert screen.end() == 0
    assert "\n0 reused" not in screen.seen
