# SPDX-License-Identifier: Apache-2.0
"""Writes an artifact folder, all or nothing: files gather in a partial folder beside it, which is renamed at the end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .artifact import FORMAT, MANIFEST_NAME, OWNED_FOLDERS, file_sha256, format_version
from .partial import partial_folder


class ArtifactWriter:
    """An artifact that is being written; made by `write_artifact`."""

    def __init__(self, path: Path, output: Path) -> None:
        self.path = path
        self._output = output

    def commit(self, manifest: dict[str, Any]) -> None:
        """Writes the manifest with the digest of every file, last, and moves the folder to its place."""
        names = sorted(entry.relative_to(self.path).as_posix() for entry in self.path.rglob("*") if entry.is_file())
        files = {
            name: {"sha256": file_sha256(self.path / name), "size": (self.path / name).stat().st_size}
            for name in names
        }
        document = {"format": FORMAT, "format_version": format_version(manifest["model"]), **manifest, "files": files}
        text = json.dumps(document, indent=2, sort_keys=True) + "\n"
        (self.path / MANIFEST_NAME).write_text(text, encoding="utf-8")
        for folder in OWNED_FOLDERS:
            if not any((self.path / folder).iterdir()):
                (self.path / folder).rmdir()
        self._replace()

    def _replace(self) -> None:
        if not self._output.is_dir():
            self.path.rename(self._output)
            return
        with partial_folder(self._output.parent, self._output.name) as aside:
            old = self._output.rename(aside / "replaced")
            try:
                self.path.rename(self._output)
            except BaseException:
                old.rename(self._output)
                raise


@contextmanager
def write_artifact(output: Path, *, overwrite: bool = False) -> Iterator[ArtifactWriter]:
    """Yields a writer; an artifact appears at `output` only when its `commit` returns.

    Raises:
        FileExistsError: `output` exists and may not be replaced; before anything is written.
        NotADirectoryError: `output` is a file.
    """
    output = output.absolute()
    check_output(output, overwrite=overwrite)
    with partial_folder(output.parent, output.name) as folder:
        for owned in OWNED_FOLDERS:
            (folder / owned).mkdir()
        yield ArtifactWriter(folder, output)


def check_output(output: Path, *, overwrite: bool) -> None:
    """Raises FileExistsError or NotADirectoryError where an artifact may not be written to `output`."""
    if output.is_file():
        raise NotADirectoryError(f"{output} is a file; name a folder for the artifact")
    if not output.is_dir() or not any(output.iterdir()):
        return
    if not (output / MANIFEST_NAME).is_file():
        raise FileExistsError(f"{output} is not empty and holds no artifact; name another folder")
    if not overwrite:
        raise FileExistsError(f"{output} already holds an artifact; pass --overwrite (overwrite=True) to replace it")


def copy_artifact(source: Path, names: list[str], folder: Path) -> None:
    """Copies files of an artifact, by their manifest names, into a folder that has the owned folders."""
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, folder / name)
