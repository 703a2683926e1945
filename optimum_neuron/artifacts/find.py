# SPDX-License-Identifier: Apache-2.0
"""Finds the artifact that a user named, a folder or a Hub repository that is downloaded, and tells where its bytes come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from ..checkpoints.hub import commit_of, download, hub_file, refuse_revision
from ..checkpoints.hub_errors import cause_of, status_of, told
from .artifact import GRAPHS_FOLDER, MANIFEST_NAME, Artifact, is_graph_file, read_manifest
from .hub_cache import is_in_hub_cache


# What the client leaves in a folder of the user's that it downloads a file into.
_DOWNLOADED = f".cache/huggingface/download/{MANIFEST_NAME}.metadata"


def find_artifact(
    model_id: str | Path,
    *,
    export: bool | None,
    native_code: bool,
    revision: str | None,
    token: str | bool | None,
    **hub: Any,
) -> tuple[Artifact, bool] | None:
    """Returns the artifact and whether it came from the Hub, also where its folder is named; None where a checkpoint is to be exported instead.

    Args:
        export: True wants a checkpoint, False an artifact, None whichever is there.
        native_code: whether a Hub artifact's compiled graphs may be used, and are downloaded.
        hub: `cache_dir`, `force_download` and `local_files_only` of the Hub's download functions.

    Raises:
        ValueError: `export=True` names an artifact, or `revision` is one of a folder.
        FileNotFoundError: `export=False` names no artifact, or there is no such revision.
        RuntimeError: the Hub refuses or fails, as `hub_errors.told` says.
    """
    path = Path(model_id).expanduser()
    if hub_file(model_id) is not None and export is not False:
        return None
    if path.exists() or path.suffix == ".gguf":
        refuse_revision(path, revision)
        if not (path / MANIFEST_NAME).is_file() and export is not False:
            return None
        if export:
            raise ValueError(f"{path} is an artifact already; leave out export=True, or name its checkpoint")
        from_hub = is_from_hub(path)
        return Artifact.open(path, with_graphs=native_code or not from_hub), from_hub
    if export:
        return None
    manifest = _hub_manifest(str(model_id), export=export, revision=revision, token=token, **hub)
    if manifest is None:
        if export is False:
            raise FileNotFoundError(
                f"{model_id} is neither a folder nor a Hub repository with {MANIFEST_NAME}; export it first"
            )
        return None
    files = read_manifest(manifest.parent)["files"]
    wanted = [MANIFEST_NAME, *(name for name in files if native_code or not is_graph_file(name))]
    # The files that this manifest lists, also where somebody pushes to the branch meanwhile.
    commit = commit_of(manifest.parent, revision)
    folder = download(str(model_id), wanted, revision=commit, token=token, **hub)
    for name in wanted:
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{model_id} lists {name}, which is not in the Hub cache and could not be downloaded; load it again when the Hub can be "
                f"reached, or have the artifact pushed again"
            )
    return Artifact.open(folder, with_graphs=native_code), True


def is_from_hub(folder: Path) -> bool:
    """Whether an artifact's manifest or compiled graphs came from the Hub, wherever its cache is and whatever links lead there."""
    graphs = folder / GRAPHS_FOLDER
    files = [folder / MANIFEST_NAME, *(graphs.iterdir() if graphs.is_dir() else ())]
    return (folder / _DOWNLOADED).is_file() or any(map(is_in_hub_cache, files))


def _hub_manifest(repo_id: str, *, export: bool | None, **options: Any) -> Path | None:
    with told(repo_id, options["revision"] or "main"):
        try:
            return Path(hf_hub_download(repo_id, MANIFEST_NAME, **options))
        except LocalEntryNotFoundError as error:
            if export is False and status_of(cause_of(error)) is not None:
                raise
            return None  # offline and not in the cache, or the Hub fails: a checkpoint of this name may be there
        except EntryNotFoundError:
            return None  # no artifact: a checkpoint of this name may be there
        except GatedRepoError:
            raise
        except (HFValidationError, RepositoryNotFoundError):
            return None  # nothing of this name: the search for a checkpoint says so
