# SPDX-License-Identifier: Apache-2.0
"""Downloads from the Hub, with errors that tell what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from .hub_errors import cause_of, status_of, told


def refuse_revision(path: Path, revision: str | None) -> None:
    """Raises ValueError where a revision of what is a local path was asked for."""
    if revision is not None:
        raise ValueError(
            f"revision={revision!r} names a state of a Hub repository, and {path} is a local path; leave --revision out, or "
            f"name the repository"
        )


def download(repo_id: str, patterns: list[str], *, revision: str | None, token: str | bool | None, **hub: Any) -> Path:
    """Downloads a Hub repository's files that match `patterns`; what an interrupted download has left is not downloaded again.

    Raises:
        FileNotFoundError: the name is neither a local path nor a repository that can be read, or has no such revision.
        RuntimeError: the Hub refuses or fails, as `hub_errors.told` says.
    """
    with told(repo_id, revision or "main"):
        try:
            return Path(snapshot_download(repo_id, revision=revision, token=token, allow_patterns=patterns, **hub))
        except GatedRepoError:
            raise
        except (HFValidationError, RepositoryNotFoundError) as error:
            raise FileNotFoundError(
                f"{repo_id} is neither a local path nor a Hub repository that can be read; check the name, or pass token"
            ) from error
        except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
            if status_of(cause_of(error)) is not None:
                raise
            raise FileNotFoundError(
                f"{repo_id} is no local path, is not in the Hub cache, and the Hub cannot be reached; check the name or "
                f"go online"
            ) from error
