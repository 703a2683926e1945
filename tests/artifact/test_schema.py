# SPDX-License-Identifier: Apache-2.0
"""JSON that came from elsewhere is parsed in a time that grows as its length does, and no file is waited for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from optimum_neuron.artifact.filesystem import open_regular
from optimum_neuron.artifact.schema import _members, parse_object, read_object


class Counted:
    """A name that counts how often it is looked at."""

    looked_at = 0

    def __init__(self, number: int) -> None:
        self._number = number

    def __hash__(self) -> int:
        Counted.looked_at += 1
        return hash(self._number)

    def __eq__(self, other: object) -> bool:
        Counted.looked_at += 1
        return isinstance(other, Counted) and self._number == other._number


def looks_at(names: int, *, repeated: int) -> int:
    """How often names are looked at where the last is one of them again."""
    Counted.looked_at = 0
    with pytest.raises(ValueError, match="occurs twice"):
        _members([(Counted(number), None) for number in (*range(names), repeated)])  # type: ignore[misc]
    return Counted.looked_at


@pytest.mark.parametrize("repeated", [0, 999])
def test_twice_as_many_names_are_looked_at_twice_as_often(repeated: int) -> None:
    once, twice = looks_at(1000, repeated=repeated), looks_at(2000, repeated=2 * repeated)
    assert twice <= 2.1 * once


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
