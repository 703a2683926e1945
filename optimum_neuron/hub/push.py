# SPDX-License-Identifier: Apache-2.0
"""An artifact to a repository of the Hub: all of its files and its card in one commit, so that nobody ever loads a mixture of two."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, RemoteEntryNotFoundError
from huggingface_hub.hf_api import RepoFile

from .. import progress
from ..artifacts.artifact import MANIFEST_NAME, OWNED_FOLDERS, Artifact
from ..artifacts.measurements import MEASUREMENTS_NAME, read_measurements
from ..checkpoints.card_facts import CARD_NAME
from ..checkpoints.hub_errors import patiently, status_of, told
from ..inspect.collect import collect
from .card import is_made, make_card


logger = logging.getLogger(__name__)

_MAIN = "main"
_PULL_REQUEST = "refs/pr/"
_FORBIDDEN = 403
_LARGEST_CARD = 5 << 20


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
    """Uploads an artifact; the repository and the branch are made where there are none.

    What an interrupted push has uploaded is not uploaded again, and nothing of it is seen before the commit at the end. Graphs and
    weights that the repository has of another artifact are removed in the same commit. A README.md that was not made here, or was
    changed since, stays as it is, in the folder and in the repository, but for `tags` that it lacks.

    Args:
        repo_id: as org/name.
        private: whether the repository is; default: as it is, or where it is made here, as its owner has chosen.
        token, revision, create_pr, commit_message, commit_description: as in transformers' push_to_hub.
        base_model: Hub id of the checkpoint, for the card; default: the repository that the export read.
        tags: of the card, beside its own.

    Raises:
        ArtifactError: a file was changed after the export.
        ValueError: the repository is there, and not as `private` says; or as `hub_errors.told` says.
        FileNotFoundError, RuntimeError: as `hub_errors.told` says.
    """
    card = local_card(artifact, repo_id=repo_id, base_model=base_model, tags=tags)
    with progress.stage("Hashing files"):
        additions = _additions(artifact)
    api = HfApi(token=token)
    branch = revision or _MAIN
    with told(repo_id, branch):
        repo_id = patiently(lambda: api.create_repo(repo_id, private=private, exist_ok=True)).repo_id
        if private is not None:
            _check_private(api, repo_id, private)
        if revision is not None and not revision.startswith(_PULL_REQUEST):
            patiently(lambda: _make_branch(api, repo_id, revision, may_fail=create_pr))
        there = {
            each.path
            for each in patiently(lambda: list(api.list_repo_tree(repo_id, recursive=True, revision=revision)))
            if isinstance(each, RepoFile)
        }
        if CARD_NAME in there:
            card = _remote_card(api, repo_id, revision, made=card, tags=tags)
        names = {each.path_in_repo for each in additions}
        stale = sorted(path for path in there - names if path.partition("/")[0] in OWNED_FOLDERS)
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            *additions,
            CommitOperationAdd(CARD_NAME, card.encode()),
            *(CommitOperationDelete(path, is_folder=False) for path in stale),
        ]
        with progress.stage(f"Uploading to {repo_id}"):
            return patiently(
                lambda: api.create_commit(
                    repo_id,
                    operations,
                    commit_message=commit_message or "Upload model",
                    commit_description=commit_description,
                    revision=revision,
                    create_pr=create_pr,
                )
            )


def local_card(
    artifact: Artifact, *, repo_id: str | None = None, base_model: str | None = None, tags: Sequence[str] | None = None
) -> str:
    """The README.md in an artifact's folder, where somebody wrote it; else one that is made of the artifact.

    Raises:
        ArtifactError: a file was changed after the export, or measurements are of another artifact.
        ValueError: the README.md is no text, or has no metadata that tags could be added to.
    """
    written = read_card(artifact.path)
    if written is not None and not is_made(written):
        return with_tags(written, tags or ())
    return make_card(collect(artifact), repo_id=repo_id, base_model=base_model, tags=tags)


def read_card(folder: Path) -> str | None:
    """A folder's README.md, if it has one.

    Raises:
        ValueError: it is no text, or too long to be one.
    """
    path = folder / CARD_NAME
    if not path.is_file():
        return None
    return _text(path)


def _text(path: Path) -> str:
    if path.stat().st_size > _LARGEST_CARD:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes, more than a card may have; shorten or remove it")
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text; correct or remove it") from error


def _additions(artifact: Artifact) -> list[CommitOperationAdd]:
    """All files of an artifact, whose digests are compared as they are computed for the upload."""
    additions = []
    for name in artifact.manifest["files"]:
        addition = CommitOperationAdd(name, artifact.path / name)
        artifact.check_digest(name, addition.upload_info.sha256.hex())
        additions.append(addition)
    additions.append(CommitOperationAdd(MANIFEST_NAME, artifact.path / MANIFEST_NAME))
    if read_measurements(artifact) is not None:
        additions.append(CommitOperationAdd(MEASUREMENTS_NAME, artifact.path / MEASUREMENTS_NAME))
    return additions


def _check_private(api: HfApi, repo_id: str, private: bool) -> None:
    """Of a repository that was there already, the Hub ignores what is asked for."""
    found = patiently(lambda: api.repo_info(repo_id)).private
    if found is not None and found != private:
        state, other = ("private", "public") if found else ("public", "private")
        raise ValueError(
            f"{repo_id} is there already, and is {state}, not {other}; name another repository, or change it on the Hub"
        )


def _make_branch(api: HfApi, repo_id: str, branch: str, *, may_fail: bool) -> None:
    """Makes a branch; who may not, and asks for a pull request, is told by the commit where there is none."""
    try:
        api.create_branch(repo_id, branch=branch, exist_ok=True)
    except HfHubHTTPError as error:
        if not (may_fail and status_of(error) == _FORBIDDEN):
            raise


def _remote_card(api: HfApi, repo_id: str, revision: str | None, *, made: str, tags: Sequence[str] | None) -> str:
    """The card to upload where there is one already: what somebody wrote stays, with the tags that it lacks."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            there = _text(Path(api.hf_hub_download(repo_id, CARD_NAME, revision=revision, local_dir=scratch)))
        except RemoteEntryNotFoundError:  # removed meanwhile
            return made
    if is_made(there) or not is_made(made):
        return made
    logger.warning("%s has a README.md that somebody wrote; it stays, and none is made", repo_id)
    return with_tags(there, tags or ())


def with_tags(card: str, tags: Sequence[str]) -> str:
    """A card whose metadata has further tags; as it is where it has them all.

    Raises:
        ValueError: its metadata cannot be read, or has no end.
    """
    from huggingface_hub import ModelCard
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    if not tags:
        return card
    text = card.removeprefix("\ufeff")  # of a byte order mark, before which the Hub finds no metadata
    if text.lstrip().startswith("---") and not REGEX_YAML_BLOCK.search(text):
        raise ValueError(
            f"{CARD_NAME} begins with --- and its metadata has no end, so no tags can be added to it; end it by a line of ---"
        )
    try:
        parsed = ModelCard(text, ignore_metadata_errors=True)
    except Exception as error:  # of a YAML parser
        raise ValueError(f"the metadata of {CARD_NAME} cannot be read, to add tags to: {error}; correct it") from error
    own = parsed.data.get("tags") or []
    missing = [tag for tag in tags if tag not in own]
    if not missing:
        return card
    parsed.data["tags"] = [*own, *missing]
    return str(parsed)
