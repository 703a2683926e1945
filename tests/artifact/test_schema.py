# SPDX-License-Identifier: Apache-2.0
"""JSON that came from elsewhere: a name stands once, and no file is waited for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from optimum_neuron.artifact.filesystem import open_regular
from optimum_neuron.artifact.schema import parse_object, read_object


def test_a_name_that_occurs_twice_is_shown() -> None:
    assert list(parse_object(b'{"b": {"a": 1}, "a": {"b": 2}}')) == ["b", "a"]
    with pytest.raises(ValueError, match="the name 'a' occurs twice"):
        parse_object(b'{"b": {"a": 1, "c": 2, "a": 3}}')


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    (tmp_path / "document").write_text(json.dumps({"a": 1}), encoding="utf-8")
    for name in ("pipe", "link", "."):
        with pytest.raises(OSError, match="is no regular file; remove it"):
            open_regular(tmp_path / name)
    assert read_object(tmp_path / "document") == {"a": 1}
