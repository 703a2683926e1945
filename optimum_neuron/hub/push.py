# SPDX-License-Identifier: Apache-2.0
"""Uploads to repositories of the Hub: all files and the card in one commit, so that no reader sees a mixture of two artifacts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi

from .. import progress
from ..artifact.artifact import MANIFEST_NAME, OWNED_FOLDERS, Artifact
from ..checkpoints.hub import explained_errors, try_again
from ..checkpoints.origin import CARD_NAME
from .card import make_card, own_words
from .collect import read_facts


logger = logging.getLogger(__name__)

_PULL_REQUEST = "refs/pr/"


def push_artifact(
    artifact: Artifact,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
    base_model: str | None = None,
    tags: Sequence[str] | None = None,
) -> CommitInfo:
    """Upload an artifact in one commit; make the repository and the branch where they are missing.

    The next push does not upload again what an interrupted one has uploaded. The commit removes the graphs and weights of an earlier artifact. A
    README.md that a person wrote or changed, in the folder or else in the repository, stays as it is.

    Args:
        private: whether the repository is; default: as it is, or as its owner has chosen for new ones.
        token, revision, create_pr, commit_message, commit_description: as in transformers' push_to_hub.
        base_model, tags: of the card, as in `make_card`.

    Raises:
        ArtifactError: a file was changed after the export, or measured speeds belong to another artifact.
        ValueError: the repository exists, and not as `private` says; or as `explained_errors` says.
        FileNotFoundError, RuntimeError: as `explained_errors` says.
    """
    written = own_words(artifact.path / CARD_NAME)
    made = make_card(read_facts(artifact), repo_id=repo_id, base_model=base_model, tags=tags)
    with progress.stage("Hashing files"):
        additions = _list_additions(artifact)
    api = HfApi(token=token)

    def commit_files() -> CommitInfo:
        repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        # The Hub ignores another visibility than that of a repository that exists.
        found = None if private is None else api.repo_info(repo).private
        if found is not None and found != private:
            state, other = ("private", "public") if found else ("public", "private")
            raise ValueError(
                f"{repo} is there already, and is {state}, not {other}; name another repository, or change it on the Hub"
            )
        if revision is not None and not create_pr and not revision.startswith(_PULL_REQUEST):
            api.create_branch(repo, branch=revision, exist_ok=True)
        there, own = set(api.list_repo_files(repo, revision=revision)), written
        if own is None and CARD_NAME in there:
            own = own_words(Path(api.hf_hub_download(repo, CARD_NAME, revision=revision)))
        if own is not None and (written is None or tags or base_model):
            logger.warning(
                f"{repo}: a README.md that a person wrote or changed stays as it is; add tags and the base model there"
            )
        stale = sorted(there - {each.path_in_repo for each in additions})
        return api.create_commit(
            repo,
            [
                *additions,
                CommitOperationAdd(CARD_NAME, (made if own is None else own).encode()),
                *(CommitOperationDelete(name) for name in stale if name.partition("/")[0] in OWNED_FOLDERS),
            ],
            commit_message=commit_message or "Upload model",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )

    with explained_errors(repo_id, revision or "main"), progress.stage(f"Uploading to {repo_id}"):
        return try_again(commit_files)


def _list_additions(artifact: Artifact) -> list[CommitOperationAdd]:
    """Return all files of an artifact; the digests of the upload are compared with the manifest's."""
    names = (*artifact.manifest["files"], MANIFEST_NAME)
    additions = [CommitOperationAdd(name, artifact.path / name) for name in names]
    for each in additions:
        if each.path_in_repo in artifact.manifest["files"]:
            artifact.check_digest(each.path_in_repo, each.upload_info.sha256.hex())
    return additions
