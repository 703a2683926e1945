# SPDX-License-Identifier: Apache-2.0
"""Finds the artifact that `from_pretrained` was asked for: a folder, or a Hub repository that is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from .artifact import MANIFEST_NAME, Artifact, is_graph_file
from .hub import download


def find_artifact(
    model_id: str | Path,
    *,
    export: bool | None,
    native_code: bool,
    revision: str | None,
    token: str | bool | None,
    **hub: Any,
) -> tuple[Artifact, bool] | None:
    """Returns the artifact and whether it came from the Hub; None where a checkpoint is to be exported instead.

    Args:
        export: True wants a checkpoint, False an artifact, None whichever is there.
        native_code: whether a Hub artifact's compiled graphs may be used, and are downloaded.
        hub: `cache_dir`, `force_download` and `local_files_only` of the Hub's download functions.

    Raises:
        ValueError: `export=True` names an artifact.
        FileNotFoundError: `export=False` names no artifact.
    """
    path = Path(model_id).expanduser()
    if path.exists() or path.suffix == ".gguf":
        if (path / MANIFEST_NAME).is_file():
            if export:
                raise ValueError(f"{path} is an artifact already; leave out export=True, or name its checkpoint")
            return Artifact.open(path), False
        return None if export is not False else (Artifact.open(path), False)
    if export:
        return None
    manifest = _hub_manifest(str(model_id), revision=revision, token=token, **hub)
    if manifest is None:
        if export is False:
            raise FileNotFoundError(
                f"{model_id} is neither a folder nor a Hub repository with {MANIFEST_NAME}; export it first"
            )
        return None
    files = json.loads(manifest.read_text(encoding="utf-8")).get("files", {})
    wanted = [MANIFEST_NAME, *(name for name in files if native_code or not is_graph_file(name))]
    folder = download(str(model_id), wanted, revision=revision, token=token, **hub)
    return Artifact.open(folder, with_graphs=native_code), True


def _hub_manifest(repo_id: str, **options: Any) -> Path | None:
    try:
        return Path(hf_hub_download(repo_id, MANIFEST_NAME, **options))
    except (EntryNotFoundError, LocalEntryNotFoundError):
        return None  # no artifact, or offline and not in the cache: a checkpoint of this name may be there
    except (HFValidationError, RepositoryNotFoundError):
        return None  # nothing of this name: the search for a checkpoint says so
