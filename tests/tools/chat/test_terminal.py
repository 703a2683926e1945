# SPDX-License-Identifier: Apache-2.0
"""What is read from a terminal or a pipe, what is shown, and what Ctrl-C ends."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import sys
from pathlib import Path

import pytest
from helpers import Artifacts, Cli

from optimum_neuron.tools.chat.loop import Terminal


MESSAGES = {
    "a\n\nb": ["a", "", "b"],
    "  /help  \n": ["/help"],
    '"""one\n\n  two"""\nthree\n': ["one\n\n  two", "three"],
    '""" one """  \n': ["one"],
    '"""\n/usr\n"""\n': ["/usr"],
    'say """ twice\n': ['say """ twice'],
}


def test_messages_of_one_line_and_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, read in MESSAGES.items():
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        terminal = Terminal()
        found = [terminal.read_input() for _ in read]
        assert [entry for entry, _ in found] == read and found[0][1] == text.startswith('"""')
        with pytest.raises(EOFError):
            terminal.read_input()
    monkeypatch.setattr(sys, "stdin", io.StringIO('"""one\ntwo\n'))
    with pytest.raises(ValueError, match="has no end"):
        Terminal().read_input()


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


def test_lines_of_a_pipe_are_obeyed(cpu_artifact: Artifacts, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    lines = 'a\n/help\n/system Be  brief.\n/reset\n"""/b"""\n/exit\nnever read\n'
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    code, out, err = cli("neuron", "chat", cpu_artifact("llama"), "--max-new-tokens", "3")
    assert code == 0
    counted, *helped, system, cleared, answered = err.splitlines()
    assert counted.startswith("19 tokens computed, 0 reused, TTFT ") and "3 new tokens at" in counted
    assert counted.endswith("room for 42 more, cut at --max-new-tokens")
    for name in ("/clear, /reset", "/system", "/exit, /quit", '"""', "Ctrl-C"):
        assert name in "\n".join(helped)
    assert (system, cleared) == ("the system message is set", "a new conversation, with the same system message")
    assert answered.startswith("39 tokens computed, ") and not out.startswith(">")


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
    """A process at a terminal of its own: a test presses its keys and reads its screen."""

    def __init__(self, script: str, *arguments: str | Path) -> None:
        self._pid, self._terminal = pty.fork()
        if not self._pid:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # what a shell starts in the background ignores it
            command = [sys.executable, "-c", script, *map(str, arguments)]
            os.execve(sys.executable, command, {**os.environ, "TERM": "xterm"})
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
        """Wait for more; return False at the end of the process."""
        for _ in range(120):
            if select.select([self._terminal], [], [], 1)[0]:
                try:
                    data = os.read(self._terminal, 4096)
                except OSError:  # on Linux: the other side is closed
                    return False
                self.seen += data.decode(errors="replace")
                return bool(data)
            # Without a signal Python misses a Ctrl-C just before it waits for a key.
            os.kill(self._pid, signal.SIGWINCH)
        os.kill(self._pid, signal.SIGKILL)
        raise AssertionError(f"nothing comes behind {self.seen!r}")


def test_ctrl_c_ends_an_answer_or_a_line_and_ctrl_d_the_chat(cpu_artifact: Artifacts) -> None:
    prompt = "> "
    screen = Screen(SLOW_CHAT, cpu_artifact("llama"), "--max-new-tokens", "40")
    for texts, keys in (
        (("loading ", "loaded in ", prompt), "a\n"), (("~~~",), "\x03"), (("interrupted", prompt), "half a line"), (("line",), "\x03"),
        ((prompt,), "/nothing\n"), (("is no command", prompt), "b\n"), (("reused", prompt), "\x04"),
    ):  # fmt: skip
        for text in texts:
            screen.wait(text)
        screen.press(keys)
    assert screen.end() == 0
    assert "\n0 reused" not in screen.seen
