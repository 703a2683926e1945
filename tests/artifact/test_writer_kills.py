# SPDX-License-Identifier: Apache-2.0
"""The writer and its process: killed at any step, or one of several at once, an artifact is whole, and nothing is lost."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from writing import MANIFEST, fill, fork, in_child, names, read, write

from optimum_neuron.artifact import partial, writer
from optimum_neuron.artifact.partial import partial_folder
from optimum_neuron.artifact.writer import check_output, write_artifact


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the disk: a kill loses nothing that was written."""
    monkeypatch.setattr(writer, "sync", lambda path: None)


def kill_everywhere(prepare: Callable[[], None], action: Callable[[], object]) -> Iterator[int]:
    """Yields after each kill, at one step later each time, until the action comes to its end."""
    for step in range(1, 1000):
        prepare()
        status = in_child(action, kill_at=step)
        assert status in (0, signal.SIGKILL), "see the child's traceback"
        if status == 0:
            assert step > 10, "the steps of a writer are not seen any more"
            return
        yield step


def write_old(output: Path) -> None:
    shutil.rmtree(output.parent, ignore_errors=True)
    write(output, "old")


def test_a_kill_at_any_step_of_a_replacement_loses_nothing(quick: None, output: Path, protocol: bool) -> None:
    def prepare() -> None:
        write_old(output)
        (output / "notes.txt").write_text("mine", encoding="utf-8")

    found = set()
    for _ in kill_everywhere(prepare, lambda: write(output, "new", overwrite=True)):
        if protocol:
            assert read(output) in ("old", "new")  # at once, and for whoever reads meanwhile
        check_output(output, overwrite=True)
        found.add(read(output))
        assert (output / "notes.txt").read_text(encoding="utf-8") == "mine"
        assert names(output.parent) == ["artifact"]
    assert found == {"old", "new"}
    assert read(output) == "new" and (output / "notes.txt").is_file()


def test_a_kill_at_any_step_of_a_new_artifact_leaves_all_or_nothing(quick: None, output: Path) -> None:
    for _ in kill_everywhere(lambda: shutil.rmtree(output.parent, ignore_errors=True), lambda: write(output, "new")):
        assert not output.exists() or read(output) == "new"
        check_output(output, overwrite=True)
        assert not output.parent.exists() or names(output.parent) in ([], ["artifact"])
        write(output, "next", overwrite=True)
        assert read(output) == "next" and names(output.parent) == ["artifact"]


def test_a_kill_while_a_killed_replacement_is_settled_loses_nothing(
    quick: None, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recovery is itself ended at every step; the first process ended where only the replaced copy is left."""
    monkeypatch.setattr(writer, "exchange", lambda left, right: False)
    work = output.with_name(".artifact.partial")

    def prepare() -> None:
        write_old(output)
        with write_artifact(output, overwrite=True) as writing:
            fill(writing, "new")
            shutil.copytree(work, output.with_name("kept"))
        shutil.move(output.with_name("kept"), work)
        shutil.move(output, work / "replaced")

    for _ in kill_everywhere(prepare, lambda: check_output(output, overwrite=True)):
        check_output(output, overwrite=True)
        assert read(output) == "old" and names(output.parent) == ["artifact"]


def test_what_is_put_back_is_whole_though_its_removal_was_killed(quick: None, output: Path) -> None:
    """Its successor was removed by hand after the kill."""
    for _ in kill_everywhere(lambda: write_old(output), lambda: write(output, "new", overwrite=True)):
        shutil.rmtree(output)
        check_output(output, overwrite=True)
        assert not output.exists() or read(output) in ("old", "new")


def test_an_output_has_one_writer_at_a_time(output: Path) -> None:
    with write_artifact(output) as writing:
        words = r"another process is writing an artifact to .*artifact; wait for it, or name"
        for overwrite in (False, True):
            with pytest.raises(FileExistsError, match=words):
                write(output, "second", overwrite=overwrite)
        assert in_child(lambda: write(output, "from another process")) != 0
        write(output.with_name("other"), "other")
        fill(writing, "first")
        writing.commit(MANIFEST)
    assert read(output) == "first" and names(output.parent) == ["artifact", "other"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("count", [2, 4])
def test_of_writers_that_start_together_one_wins_and_the_others_are_told(
    output: Path, tmp_path: Path, count: int, overwrite: bool
) -> None:
    """They race through start, work and end in any order; with `overwrite`, several may win in turn."""
    gate, start = os.pipe()

    def compete(number: int) -> None:
        os.close(start)
        os.read(gate, 1)
        try:
            write(output, f"writer {number}", overwrite=overwrite)
            outcome = "won"
        except FileExistsError as error:
            outcome = str(error)
        (tmp_path / f"{number}.txt").write_text(outcome, encoding="utf-8")

    children = [fork(lambda number=number: compete(number)) for number in range(count)]
    os.close(gate)
    os.close(start)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * count
    outcomes = [(tmp_path / f"{number}.txt").read_text(encoding="utf-8") for number in range(count)]
    winners = [f"writer {number}" for number, outcome in enumerate(outcomes) if outcome == "won"]
    assert len(winners) == 1 or (overwrite and winners)
    assert read(output) in winners and names(output.parent) == ["artifact"]
    refusals = ("another process is writing an artifact to", "already holds an artifact; pass --overwrite")
    assert all(any(words in outcome for words in refusals) for outcome in outcomes if outcome != "won")


def test_a_fork_of_a_writer_does_not_keep_its_output_locked(output: Path) -> None:
    """A child shares the lock with its parent, whose death alone frees nothing; the end of its work does."""
    with write_artifact(output) as writing:
        gate, start = os.pipe()
        pid = fork(lambda: (os.close(start), os.read(gate, 1)))
        fill(writing, "first")
        writing.commit(MANIFEST)
    write(output, "second", overwrite=True)
    os.close(start)
    os.close(gate)
    assert os.waitpid(pid, 0)[1] == 0
    assert read(output) == "second"


def test_folders_of_finished_and_killed_work_go_and_those_of_running_work_stay(tmp_path: Path) -> None:
    def die() -> None:
        with partial_folder(tmp_path, "compile") as killed:
            (killed / "file").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    with partial_folder(tmp_path, "compile") as running:
        (running / "file").touch()
        assert in_child(die) == signal.SIGKILL
        assert len(names(tmp_path)) == 2
        with partial_folder(tmp_path, "compile") as second:
            assert names(tmp_path) == sorted([running.name, second.name])
        (tmp_path / ".other.partial-1").mkdir()
        assert (running / "file").is_file()
    assert names(tmp_path) == [".other.partial-1"]


def test_a_new_folder_that_another_process_takes_for_abandoned_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a folder's making and its lock, whoever cleans up may lock and remove it."""
    real, cleaning = partial.fcntl.flock, []

    def flock(descriptor: int, how: int) -> None:
        (folder,) = tmp_path.iterdir()
        if not cleaning:
            cleaning.append(folder / partial.LOCK_NAME)
            held = os.open(cleaning[0], os.O_RDWR)
            real(held, fcntl.LOCK_EX)

            def clean_up() -> None:
                cleaning[0].unlink()
                folder.rmdir()
                os.close(held)

            threading.Timer(0.1, clean_up).start()
        real(descriptor, how)

    monkeypatch.setattr(partial.fcntl, "flock", flock)
    with partial_folder(tmp_path, "compile") as folder:
        assert cleaning == [folder / partial.LOCK_NAME] and cleaning[0].is_file()
    assert names(tmp_path) == []


def test_a_folder_removed_while_somebody_waits_for_it_is_held_by_one_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a waiter's open and its lock, the holder removes the file: the waiter must not take that for its lock."""
    folder, path = tmp_path / "work", tmp_path / "work" / partial.LOCK_NAME
    real, opened = partial.fcntl.flock, []

    def flock(descriptor: int, how: int) -> None:
        if not opened:
            path.unlink()
        opened.append(descriptor)
        real(descriptor, how)

    monkeypatch.setattr(partial.fcntl, "flock", flock)
    with partial.locked_folder(folder):
        assert len(opened) == 2
        with pytest.raises(BlockingIOError), partial.locked_folder(folder):
            pass
    assert names(tmp_path) == []


def test_a_file_system_without_locks_is_told(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(partial.fcntl, "flock", flock)
    with pytest.raises(OSError, match=r"the file system of .* has no locks \(No locks available\).*name a folder on"):
        write(output, "new")
    assert not output.exists()
