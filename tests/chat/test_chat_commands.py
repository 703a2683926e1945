# SPDX-License-Identifier: Apache-2.0
"""/commands: what each does to a conversation, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from optimum_neuron.chat import commands, messages
from optimum_neuron.chat.session import ChatSession, Totals
from optimum_neuron.chat.settings import Settings


SAID = [{"role": "user", "content": "Größe?\nYes."}, {"role": "assistant", "content": "12"}]


class Talk(ChatSession):
    """A conversation that nobody answers."""

    def __init__(self) -> None:
        self.messages = [dict(message) for message in SAID]
        self.totals = Totals(turns=3, computed=1234)
        self.settings = Settings()

    kept = property(lambda self: "kept")  # type: ignore[assignment]

    def change_settings(self, settings: Settings) -> None:
        self.settings = settings


def run(session: ChatSession, line: str) -> str:
    return commands.run(session, line, lambda piece: None).text


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/hepl", "/hepl is no command; did you mean /help?"),
        ("/resett", "did you mean /reset?"),
        ("/1234", "/1234 is no command; /help lists them"),
        ("/", "/ is no command"),
        ("/help me", "/help takes nothing, and 'me' follows it"),
        ("/save", "/save needs FILE: /save FILE"),
        ("/load nowhere.json", "nowhere.json is no file"),
        ("/set top-q 1", "'top-q' cannot be set; did you mean top-"),
        ("/set color red", "'color' cannot be set; choose one of max-new-tokens, temperature"),
        ("/set seed", "/set seed needs a value"),
        ("/set seed 1.5", "seed cannot be '1.5'; give a whole number, or 'none'"),
        ("/set temperature nan", "temperature nan must be 0 or more"),
        ("/set max-new-tokens 0", "max-new-tokens 0 must be 1 or more"),
        ("/set top-p 0.5", "top-p shapes sampling: give a temperature above 0 with it"),
    ],
)
def test_what_is_wrong_is_told_and_changes_nothing(line: str, told: str) -> None:
    session = Talk()
    with pytest.raises((ValueError, OSError)) as failure:
        run(session, line)
    assert told in str(failure.value) and "\n" not in str(failure.value)
    assert (session.messages, session.settings) == (SAID, Settings())


def test_help_names_every_command_and_how_to_write() -> None:
    text = run(Talk(), "/help")
    for name in (*commands.COMMANDS, *commands.ALIASES, '"""', "Ctrl-C"):
        assert name in text


def test_values_are_set_and_left_to_the_program_again() -> None:
    session = Talk()
    run(session, "/set temperature 0.7")
    run(session, "/set top-k=5")
    assert session.settings == Settings(temperature=0.7, top_k=5)
    with pytest.raises(ValueError, match="top-k shapes sampling"):
        run(session, "/set temperature none")
    run(session, "/set top_k none")
    assert "temperature 0.7, top-k none" in run(session, "/set")


def test_system_undo_clear_stats_and_exit() -> None:
    session = Talk()
    assert "computed again" in run(session, "/system Be  brief.")
    assert session.system == "Be  brief."
    assert "1 messages of yours, 'Be  brief.'" in run(session, "/stats")
    assert "1,234 tokens computed" in run(session, "/stats")
    assert run(session, "/undo") == "taken back: Größe?\nYes."
    assert "same system message" in run(session, "/reset")
    run(session, "/system")
    assert session.messages == []
    assert commands.run(session, "/quit", print).leaves


def test_a_conversation_is_saved_to_a_new_file_and_loaded(tmp_path: Path) -> None:
    session, path = Talk(), tmp_path / "a b.json"
    assert run(session, f"/save {path}") == f"2 messages in {path}"
    assert json.loads(path.read_text(encoding="utf-8")) == {"messages": SAID}
    with pytest.raises(FileExistsError, match="exists already"):
        run(session, f"/save {path}")
    session.messages = []
    run(session, f"/load {path}")
    assert session.messages == SAID


@pytest.mark.parametrize(
    ("held", "told"),
    [
        (b"", "Expecting value"),
        (b"[]", "a list, not an object"),
        (b"{}", "no list of messages"),
        (b'{"messages": {}}', "no list of messages"),
        (b'{"messages": [1]}', "messages[0] is no object of role and content"),
        (b'{"messages": [{"role": "user", "content": "a", "name": "b"}]}', "role and content alone"),
        (b'{"messages": [{"role": "tool", "content": "a"}]}', "the role 'tool'"),
        (b'{"messages": [{"role": ["user"], "content": "a"}]}', "the role ['user']"),
        (b'{"messages": [{"role": "user", "content": 1}]}', "is no text"),
        (b'{"messages": [{"role": "user", "content": "\\udcff"}]}', "no UTF-8"),
        (b'{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "a"}]}', "only the first"),
        (b"\xff", "codec can't decode"),
        (b"[" * 100_000, "nested too deep"),
    ],
)
def test_a_file_without_a_conversation_is_refused(held: bytes, told: str, tmp_path: Path) -> None:
    session, path = Talk(), tmp_path / "talk.json"
    path.write_bytes(held)
    with pytest.raises(ValueError) as failure:
        run(session, f"/load {path}")
    assert str(failure.value).startswith(f"{path} holds no conversation: ") and told in str(failure.value)
    assert session.messages == SAID


def test_nothing_stays_of_a_file_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def write(self, text: str) -> None:
            raise OSError(28, "No space left on device")

    path, real = tmp_path / "talk.json", Path.open

    def full(self: Path, *args: Any, **options: Any) -> Any:
        real(self, *args, **options).close()
        return Full()

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match="No space left"):
        messages.save(cast(Any, SAID), path)
    assert not path.exists()
