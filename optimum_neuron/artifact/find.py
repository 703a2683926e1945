# SPDX-License-Identifier: Apache-2.0
"""Find the artifact that a user named, a folder or a Hub repository, and whether its bytes come from the Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..checkpoints.origin import CARD_NAME
from .artifact import GRAPHS_FOLDER, HUB_FOLDERS, MANIFEST_NAME, Artifact, is_graph_file, read_manifest


# A trace of the Hub's client in a folder that it downloads a file into.
_DOWNLOADED = f".cache/huggingface/download/{MANIFEST_NAME}.metadata"
# A cache holds a folder per repository, and in it the files and folders of links to them.
_REPOSITORY = re.compile(r"(models|datasets|spaces)--.+")
# The system follows no more links.
_MOST_LINKS = 40


def find_artifact(
    model_id: str | Path,
    *,
    export: bool | None,
    native_code: bool,
    revision: str | None,
    token: str | bool | None,
    **hub: Any,
) -> tuple[Artifact, bool] | None:
    """Return an artifact and whether it came from the Hub, also where its folder is named; None for a checkpoint to be exported.

    Args:
        export: True wants a checkpoint, False an artifact, None takes either.
        native_code: a Hub artifact's compiled graphs may be used, and are downloaded.

    Raises ValueError if `export=True` names an artifact, or `revision` is given for a folder; FileNotFoundError if
    `export=False` names no artifact, or there is no such revision; RuntimeError if the Hub refuses or fails, as
    `hub.explained_errors` says.
    """
    path = Path(model_id).expanduser()
    if path.exists() and revision is None:
        return _find_local(path, export=export, native_code=native_code)
    # It takes longer to import than to open an artifact.
    from ..checkpoints.hub import commit_of, download, hub_file, refuse_revision

    if hub_file(model_id) is not None and export is not False:
        return None
    if path.exists() or path.suffix == ".gguf":
        refuse_revision(path, revision)
        return _find_local(path, export=export, native_code=native_code)
    if export:
        return None
    # A checkpoint needs the other two files.
    names = [MANIFEST_NAME, "config.json", CARD_NAME]
    manifest = download(str(model_id), names, revision=revision, token=token, **hub) / MANIFEST_NAME
    if not manifest.is_file():
        if export is False:
            raise FileNotFoundError(
                f"{model_id} is neither a folder nor a Hub repository with {MANIFEST_NAME}; export it first"
            )
        return None
    files = read_manifest(manifest.parent)["files"]
    wanted = [MANIFEST_NAME, *(name for name in files if native_code or not is_graph_file(name))]
    # The files that this manifest lists, also if the branch changes meanwhile.
    commit = commit_of(manifest.parent, revision)
    folder = download(str(model_id), wanted, revision=commit, token=token, **hub)
    for name in wanted:
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{model_id} lists {name}, which is not in the Hub cache and could not be downloaded; load it again when the Hub can be "
                f"reached, or have the artifact pushed again"
            )
    return Artifact.open(folder, with_graphs=native_code), True


def _find_local(path: Path, *, export: bool | None, native_code: bool) -> tuple[Artifact, bool] | None:
    if not (path / MANIFEST_NAME).is_file() and export is not False:
        return None
    if export:
        raise ValueError(f"{path} is an artifact already; leave out export=True, or name its checkpoint")
    from_hub = is_from_hub(path)
    return Artifact.open(path, with_graphs=native_code or not from_hub), from_hub


def is_from_hub(folder: Path) -> bool:
    """Return whether an artifact's manifest or compiled graphs came from the Hub, through any cache and links."""
    graphs = folder / GRAPHS_FOLDER
    files = [folder / MANIFEST_NAME, *(graphs.iterdir() if graphs.is_dir() else ())]
    return (folder / _DOWNLOADED).is_file() or any(
        _REPOSITORY.fullmatch(parent) and name in HUB_FOLDERS
        for file in files
        for place in _follow_links(file)
        for parent, name in pairwise(place.parts)
    )


def _follow_links(path: Path) -> Iterator[Path]:
    """Yield an absolute path, and the paths that it becomes as each link on the way is followed."""
    path = Path.cwd() / path
    for _ in range(_MOST_LINKS):
        yield path
        link = next((part for part in (*reversed(path.parents), path) if part.is_symlink()), None)
        if link is None:
            return
        path = link.parent / os.readlink(link) / path.relative_to(link)
