# SPDX-License-Identifier: Apache-2.0
"""The writer of an artifact folder, all or nothing: files gather in a locked folder next to it, and take their place in one step.

.<output>.partial/lock        held by the one process that writes to <output>
.<output>.partial/new         the artifact that is being written; it may be removed
.<output>.partial/replaced    a whole artifact: the one that is being replaced, or is about to replace another
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ..checkpoints.files import INDEX_NAME
from .artifact import FORMAT, MANIFEST_NAME, OWNED_FOLDERS, Artifact, format_version
from .filesystem import exchange, explained_full_disk, file_sha256, is_mount_point, sync
from .partial import LOCK_NAME, locked_folder
from .quantization import QUANTIZATION_NAME


# transformers takes an artifact for a checkpoint: the one file of this index is not there, and its name is the error.
_MISSING = "this is an artifact - load it by optimum_neuron.NeuronModelForCausalLM.from_pretrained, for it has no model.safetensors"
_NEW, _REPLACED, _PARTIAL = "new", "replaced", ".partial"


class ArtifactWriter:
    """An artifact that is being written; made by `write_artifact`."""

    def __init__(self, path: Path, output: Path, overwrite: bool) -> None:
        self.path = path
        self._output = output
        self._overwrite = overwrite

    def commit(self, manifest: dict[str, Any]) -> None:
        """Write the manifest with the digest of every file, last, and move the folder to its place.

        Raises FileExistsError if something that may not be replaced has meanwhile appeared there.
        """
        files = {
            path.relative_to(self.path).as_posix(): {"sha256": file_sha256(path), "size": path.stat().st_size}
            for path in sorted(entry for entry in self.path.rglob("*") if entry.is_file())
        }
        version = format_version(manifest["model"], manifest["config"], quantized=QUANTIZATION_NAME in files)
        document = {"format": FORMAT, "format_version": version, **manifest, "files": files}
        text = json.dumps(document, indent=2, sort_keys=True) + "\n"
        (self.path / MANIFEST_NAME).write_text(text, encoding="utf-8")
        for folder in OWNED_FOLDERS:
            if not any((self.path / folder).iterdir()):
                (self.path / folder).rmdir()
        # The replaced artifact is removed: before its successor is on the disk, a crash of the machine would lose both.
        for path in (*self.path.rglob("*"), self.path):
            sync(path)
        _check_taken(self._output, overwrite=self._overwrite)
        self._publish()

    def _publish(self) -> None:
        if self._output.is_dir():
            status = self._output.stat()
            with suppress(PermissionError):
                os.chown(self.path, status.st_uid, status.st_gid)
            self.path.chmod(status.st_mode & 0o7777)
        if (self._output / MANIFEST_NAME).is_file():
            replaced = self.path.with_name(_REPLACED)
            self.path.rename(replaced)
            if not exchange(replaced, self._output):
                replaced.rename(self.path)
                self._output.rename(replaced)
                self.path.rename(self._output)
        else:
            try:
                self.path.rename(self._output)  # this replaces an empty folder, and no other
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                raise FileExistsError(
                    f"{self._output} was filled by another process while its artifact was made; name another folder"
                ) from error
        with suppress(PermissionError):  # a folder that takes files but does not list them
            sync(self._output.parent)


@contextmanager
def write_artifact(output: Path, *, overwrite: bool = False) -> Iterator[ArtifactWriter]:
    """Yield a writer; an artifact appears at `output` only when its `commit` returns.

    A folder keeps its permissions, and the files that it holds apart from an artifact that is replaced.

    Raises FileExistsError if `output` exists and may not be replaced, or another process writes to it; before
    anything is written; NotADirectoryError if `output` is a file; OSError if the disk is full.
    """
    check_output(output, overwrite=overwrite)
    output = Path(os.path.realpath(output))  # a link stays, and its destination is replaced
    with explained_full_disk(output.parent, "name an output folder on another disk"):
        output.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(output)
        with _work_folder(output) as work, ExitStack() as stack:
            stack.callback(shutil.rmtree, work / _NEW, ignore_errors=True)
            stack.callback(_settle_work, work, output)
            _check_taken(output, overwrite=overwrite)
            for folder in (_NEW, *(f"{_NEW}/{owned}" for owned in OWNED_FOLDERS)):
                (work / folder).mkdir()
            yield ArtifactWriter(work / _NEW, output, overwrite)


def check_output(output: Path, *, overwrite: bool) -> None:
    """Raise where an artifact may not be written to `output`; put back an artifact that a killed process was replacing there.

    Raises FileExistsError if it is taken, or a mount point, or another process writes to it; NotADirectoryError if
    it is a file; PermissionError if its parent may not be written to.
    """
    output = Path(os.path.realpath(output))  # a link stays, and its destination is replaced
    if is_mount_point(output):
        raise FileExistsError(
            f"{output} is a mount point, which cannot be replaced as a whole; name a folder below it"
        )
    if _work_path(output).is_dir():
        with _work_folder(output):
            pass
    _check_taken(output, overwrite=overwrite)
    parent = next(folder for folder in output.parents if folder.exists())
    if not parent.is_dir():
        raise NotADirectoryError(f"{parent} is a file; name a folder for the artifact")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"{parent} may not be written to; name another folder")


def write_signpost(folder: Path) -> None:
    """Write an index of weights by which transformers' error says how to load an artifact."""
    index = {"metadata": {"format": "optimum-neuron-runtime"}, "weight_map": {"compiled": _MISSING}}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def copy_artifact(artifact: Artifact, folder: Path) -> None:
    """Copy an artifact's files into a folder; raise ArtifactError for one that is not the manifest's: it was changed or replaced."""
    for name in artifact.manifest["files"]:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(artifact.path / name, folder / name)
        artifact.check_digest(name, file_sha256(folder / name))


def _check_taken(output: Path, *, overwrite: bool) -> None:
    if output.exists() and not output.is_dir():
        raise NotADirectoryError(f"{output} is a file; name a folder for the artifact")
    if not output.is_dir() or not any(output.iterdir()):
        return
    if not (output / MANIFEST_NAME).is_file():
        raise FileExistsError(f"{output} is not empty and holds no artifact; name another folder")
    if not overwrite:
        raise FileExistsError(f"{output} already holds an artifact; pass --overwrite (overwrite=True) to replace it")


def _work_path(output: Path) -> Path:
    return output.with_name(f".{output.name}{_PARTIAL}")


@contextmanager
def _work_folder(output: Path) -> Iterator[Path]:
    """Hold the one folder in which an artifact for `output` is made; settle and remove the work of a killed process in it."""
    work = _work_path(output)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked_folder(work))
        except BlockingIOError:
            raise FileExistsError(
                f"another process is writing an artifact to {output}; wait for it, or name another folder"
            ) from None
        foreign = sorted({entry.name for entry in work.iterdir()} - {LOCK_NAME, _NEW, _REPLACED})
        if foreign:
            raise FileExistsError(f"{work / foreign[0]} is in the way of an export to {output}; move it")
        _settle_work(work, output)
        shutil.rmtree(work / _NEW, ignore_errors=True)
        yield work


def _remove_abandoned(output: Path) -> None:
    """Settle and remove the work of killed exports to other names in an output's folder."""
    for work in output.parent.glob(f".?*{_PARTIAL}"):
        other = work.with_name(work.name[1:].removesuffix(_PARTIAL))
        if other != output and (work / LOCK_NAME).is_file():
            with suppress(OSError), _work_folder(other):  # held, or another user's
                pass


def _settle_work(work: Path, output: Path) -> None:
    """Put back a replaced artifact where nothing has taken its place, and remove it where something has."""
    new, replaced = work / _NEW, work / _REPLACED
    if os.path.lexists(replaced):
        try:
            replaced.rename(output)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            _move_foreign(replaced, output, _own_names(replaced) | _own_names(output))
            shutil.rmtree(new, ignore_errors=True)
            replaced.rename(new)  # half removed, it would be no artifact to put back
            shutil.rmtree(new, ignore_errors=True)


def _own_names(folder: Path) -> set[str]:
    """Return the files of an artifact, as far as its manifest can be read."""
    names = {MANIFEST_NAME, *OWNED_FOLDERS}
    with suppress(OSError, ValueError, TypeError, KeyError):
        names |= set(json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))["files"])
    return names


def _move_foreign(old: Path, new: Path, own: set[str], prefix: str = "") -> None:
    """Move other files in a replaced artifact into its successor."""
    for entry in sorted(old.iterdir()):
        name, place = prefix + entry.name, new / entry.name
        if name in own:
            continue
        if entry.is_dir() and not entry.is_symlink() and place.is_dir():
            _move_foreign(entry, place, own, f"{name}/")
        elif not os.path.lexists(place):
            entry.rename(place)
