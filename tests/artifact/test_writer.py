# SPDX-License-Identifier: Apache-2.0
"""The writer and the output folder: what is there is replaced, kept or refused, by whoever and whenever it was put there."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from helpers import folder_bytes
from writing import MANIFEST, fill, in_child, names, read, write

from optimum_neuron.artifact import filesystem, writer
from optimum_neuron.artifact.artifact import MANIFEST_NAME, WEIGHTS_NAME, Artifact, ArtifactError
from optimum_neuron.artifact.partial import locked_folder
from optimum_neuron.artifact.writer import check_output, copy_artifact, write_artifact


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("moment", ["work", "last"])
def test_files_that_appear_in_an_output_folder_during_an_export_stay(
    output: Path, overwrite: bool, existing: bool, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def appear(*_: object, **__: object) -> None:
        output.mkdir(exist_ok=True)
        (output / "thesis.txt").write_text("x", encoding="utf-8")

    if existing:
        output.mkdir(parents=True)
    words = {
        "work": "is not empty and holds no artifact; name another folder",
        "last": "was filled by another process",
    }
    with pytest.raises(FileExistsError, match=words[moment]), write_artifact(output, overwrite=overwrite) as writing:
        fill(writing, "new")
        if moment == "work":
            appear()
        else:
            monkeypatch.setattr(writer, "_check_taken", appear)
        writing.commit(MANIFEST)
    assert folder_bytes(output) == {"thesis.txt": b"x"} and names(output.parent) == ["artifact"]


def test_an_artifact_that_appears_during_an_export_is_not_replaced(output: Path, tmp_path: Path) -> None:
    write(tmp_path / "other", "other")
    words = r"already holds an artifact; pass --overwrite"
    with pytest.raises(FileExistsError, match=words), write_artifact(output) as writing:
        fill(writing, "new")
        shutil.copytree(tmp_path / "other", output)
        writing.commit(MANIFEST)
    assert read(output) == "other"


def test_a_replacement_keeps_what_stands_beside_the_artifact_and_removes_its_files(
    output: Path, protocol: bool
) -> None:
    with write_artifact(output) as writing:
        fill(writing, "old")
        (writing.path / "adapter.json").write_text("{}", encoding="utf-8")
        (writing.path / "templates").mkdir()
        (writing.path / "templates" / "old.jinja").write_text("", encoding="utf-8")
        writing.commit(MANIFEST)
    for name in ("README.md", ".git/config", "templates/mine.jinja", "graphs/hostile.so"):
        (output / name).parent.mkdir(exist_ok=True)
        (output / name).write_text("mine", encoding="utf-8")
    (output / "link").symlink_to("README.md")
    with write_artifact(output, overwrite=True) as writing:
        fill(writing, "new")
        (writing.path / "templates").mkdir()
        (writing.path / "templates" / "new.jinja").write_text("", encoding="utf-8")
        writing.commit(MANIFEST)
    assert read(output) == "new"
    assert sorted(folder_bytes(output)) == [
        ".git/config", "README.md", "config.json", "link", MANIFEST_NAME, "templates/mine.jinja", "templates/new.jinja",
        WEIGHTS_NAME,
    ]  # fmt: skip
    assert (output / "link").is_symlink()


@pytest.mark.parametrize("manifest", ["{", "[]", '{"files": 3}', '{"files": [[]]}'])
def test_an_artifact_with_a_broken_manifest_can_be_replaced(output: Path, manifest: str, protocol: bool) -> None:
    write(output, "old")
    (output / MANIFEST_NAME).write_text(manifest, encoding="utf-8")
    write(output, "new", overwrite=True)
    assert read(output) == "new" and names(output.parent) == ["artifact"]


def test_the_old_artifact_stays_where_the_new_one_cannot_take_its_place(
    output: Path, monkeypatch: pytest.MonkeyPatch, protocol: bool
) -> None:
    write(output, "old")
    rename = Path.rename

    def refuse(left: Path, right: Path) -> Path:
        if right == output and left.name == "new":
            raise PermissionError("not allowed")
        return rename(left, right)

    monkeypatch.setattr(Path, "rename", refuse)
    if protocol:
        monkeypatch.setattr(writer, "exchange", Mock(side_effect=PermissionError))
    with pytest.raises(PermissionError):
        write(output, "new", overwrite=True)
    assert read(output) == "old" and names(output.parent) == ["artifact"]


def test_folders_are_swapped_in_one_step_or_left_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("left", "right"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    swapped = filesystem.exchange(tmp_path / "left", tmp_path / "right")
    assert swapped is (sys.platform == "linux")
    assert names(tmp_path / "left") == (["right"] if swapped else ["left"])
    if swapped:
        with pytest.raises(FileNotFoundError, match="gone"):
            filesystem.exchange(tmp_path / "left", tmp_path / "gone")
    monkeypatch.setattr(filesystem.ctypes, "CDLL", lambda *_, **__: object())  # another C library
    assert not filesystem.exchange(tmp_path / "left", tmp_path / "right")


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o002])
def test_a_new_folder_follows_the_umask(output: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write(output, "new")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (output, output / "weights")}
    assert modes == {0o777 & ~mask}
    assert {stat.S_IMODE(path.stat().st_mode) for path in output.rglob("*") if path.is_file()} == {0o666 & ~mask}


@pytest.mark.parametrize("filled", [False, True])
def test_a_folder_keeps_its_permissions_and_a_link_stays_a_link(
    output: Path, tmp_path: Path, filled: bool, protocol: bool
) -> None:
    if filled:
        write(output, "old")
    else:
        output.mkdir(parents=True)
    output.chmod(0o2770)
    if os.geteuid() == 0:
        os.chown(output, 12345, 54321)
    before = output.stat()
    link = tmp_path / "link"
    link.symlink_to(output)
    write(link, "new", overwrite=True)
    assert read(output) == "new" and link.is_symlink() and names(output.parent) == ["artifact"]
    after = output.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)


def test_a_mount_point_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: Path) -> None:
    words = r"is a mount point, which cannot be replaced as a whole; name a folder below it"
    with pytest.raises(FileExistsError, match=words):
        check_output(Path("/"), overwrite=True)
    # A folder that is mounted elsewhere on the same file system, with a blank in its name.
    folder = tmp_path / "a b"
    folder.mkdir()
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"36 35 98:0 / / rw\n40 36 98:0 /x {tmp_path}/a\\040b rw,noatime - ext3 /dev/root rw\n", "ascii")
    monkeypatch.setattr(filesystem, "_MOUNTS", mounts)
    with pytest.raises(FileExistsError, match=words):
        check_output(folder, overwrite=False)
    check_output(folder / "below", overwrite=False)


def test_a_parent_that_takes_no_files_is_refused_at_once(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output.parent.mkdir()
    monkeypatch.setattr(writer.os, "access", lambda path, mode: False)  # as for anybody but root, or a read-only disk
    with pytest.raises(PermissionError, match=r"out may not be written to; name another folder"):
        check_output(output, overwrite=False)


def test_a_folder_that_only_looks_like_unfinished_work_is_never_touched(output: Path) -> None:
    lookalike = output.with_name(".artifact.partial")
    write(lookalike, "somebody's own")
    with pytest.raises(FileExistsError, match=r"\.artifact\.partial/config\.json is in the way of an export"):
        write(output, "new")
    assert read(lookalike) == "somebody's own" and not output.exists()


def test_what_killed_exports_to_other_names_left_is_removed(output: Path) -> None:
    def begin(name: str) -> None:
        with write_artifact(output.with_name(name)) as writing:
            (writing.path / "config.json").write_text("{}", encoding="utf-8")
            os._exit(0)

    assert in_child(lambda: begin("killed")) == in_child(lambda: begin("held")) == 0
    (output.parent / ".own.partial").mkdir()
    with locked_folder(output.with_name(".held.partial")):
        write(output, "new")
    assert names(output.parent) == [".held.partial", ".own.partial", output.name]


def test_a_full_disk_is_one_sentence(output: Path) -> None:
    words = r"^no space is left on the disk of .*out; free some, or name an output"
    with pytest.raises(OSError, match=words) as caught, write_artifact(output):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "file")
    assert caught.value.errno is None and names(output.parent) == []


def test_a_copy_of_an_artifact_that_was_replaced_meanwhile_is_refused(output: Path, tmp_path: Path) -> None:
    write(output, "old")
    artifact = Artifact.open(output)
    write(output, "new", overwrite=True)
    words = r"config\.json was changed after the export"
    with pytest.raises(ArtifactError, match=words), write_artifact(tmp_path / "copy") as writing:
        copy_artifact(artifact, writing.path)
    assert names(tmp_path) == ["out"]
