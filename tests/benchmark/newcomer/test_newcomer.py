# SPDX-License-Identifier: Apache-2.0
"""benchmark.newcomer, without its downloads: what it reads of a server, and how it ends where a step fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmark.newcomer import __main__ as newcomer


def test_the_address_of_a_server_is_what_it_says(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    log.write_text("a warning\n", encoding="utf-8")
    assert newcomer._address(log) == "" and not newcomer._listens("")
    log.write_text(
        "serving smollm2 at http://127.0.0.1:9/v1: 4 requests of up to 2,048 tokens at once\n", encoding="utf-8"
    )
    assert newcomer._address(log) == "http://127.0.0.1:9/v1" and not newcomer._listens("http://127.0.0.1:9/v1")


def test_a_step_that_fails_is_told_with_the_end_of_what_it_printed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"ended with 3: no such package"):
        newcomer._run(
            (sys.executable, "-c", "import sys; sys.stderr.write('no such package'); sys.exit(3)"), tmp_path, {}
        )


def test_a_folder_with_something_in_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["newcomer", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        newcomer.main()
    assert ended.value.code == 1 and "is not empty; name a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
