# SPDX-License-Identifier: Apache-2.0
"""Find a checkpoint by a Hub id, a folder or a GGUF file."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from .checkpoint import Checkpoint
from .files import (
    CODE_FILES,
    INDEX_NAME,
    SINGLE_NAME,
    VERBATIM,
    check_documents,
    indexed,
    read_object,
    refuse_without_weights,
)
from .hub import commit_of, download, hub_file, refuse_revision, repository_files
from .origin import CARD_NAME


ADAPTER_CONFIG = "adapter_config.json"
GGUF = ".gguf"
_MERGE = "optimum-cli export neuron OUT --model {} --adapter {}"


def find_checkpoint(
    model: str | Path, *, revision: str | None, token: str | bool | None, trust_remote_code: bool, **hub: Any
) -> Checkpoint:
    """Find a Hub id, a folder or a .gguf file, local or as `org/repo:file.gguf`; download only weights that an export reads.

    `hub` has `cache_dir`, `force_download` and `local_files_only` of the Hub's download functions.

    Raises:
        ValueError: a revision of a local path, an adapter in the place of a checkpoint, or several GGUF files and the name of none.
        FileNotFoundError: nothing of that name exists, here or on the Hub.
    """
    path = Path(model).expanduser()
    if not str(model):
        raise FileNotFoundError("the name of the model is empty; name a checkpoint folder, a .gguf file or a Hub id")
    if path.exists():
        refuse_revision(path, revision)
    options = {"revision": revision, "token": token, **hub}
    named = hub_file(model)
    if named is not None:
        repo_id, name = named
        folder = download(repo_id, [glob.escape(name), CARD_NAME], **options)
        if not name.endswith(GGUF) or not (folder / name).is_file():
            _refuse_files(repo_id, repository_files(repo_id, folder, **options), ":", f"has no GGUF file {name}")
        return Checkpoint(folder, name, f"{repo_id}:{name}", trust_remote_code=False)
    if path.suffix == GGUF:
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist; name a file that does, or one of a Hub repository as org/repo:file{GGUF}"
            )
        return Checkpoint(path.parent, path.name, str(model), trust_remote_code)
    if path.is_file():
        raise FileNotFoundError(f"{path} is a file of another kind; name a folder, a .gguf file or a Hub id")
    if path.is_dir():
        check_documents(path)
        _refuse_adapter(path, str(model))
        if not (path / "config.json").is_file():
            _refuse_files(str(model), sorted(each.name for each in path.iterdir()), "/")
        return Checkpoint(path, None, str(model), trust_remote_code)
    patterns = [*VERBATIM, SINGLE_NAME, CARD_NAME, *(CODE_FILES if trust_remote_code else ())]
    folder = _download_described(str(model), patterns, options)
    if (folder / SINGLE_NAME).is_file():
        return Checkpoint(folder, None, str(model), trust_remote_code)
    if not (folder / INDEX_NAME).is_file():
        _refuse_files(str(model), repository_files(str(model), folder, **options), ":")
    weights = sorted(map(glob.escape, set(indexed(folder / INDEX_NAME).values())))
    download(str(model), weights, **options | {"revision": commit_of(folder, revision)})
    return Checkpoint(folder, None, str(model), trust_remote_code)


def find_config(
    model: str | Path, *, revision: str | None, token: str | bool | None, trust_remote_code: bool
) -> Checkpoint:
    """Find a checkpoint as `find_checkpoint` does, but download no weights from a Hub repository, except a GGUF file with its config."""
    path = Path(model).expanduser()
    if path.exists() or path.suffix == GGUF or hub_file(model) is not None:
        return find_checkpoint(model, revision=revision, token=token, trust_remote_code=trust_remote_code)
    patterns = ["config.json", ADAPTER_CONFIG, INDEX_NAME, *(CODE_FILES if trust_remote_code else ())]
    folder = _download_described(str(model), patterns, {"revision": revision, "token": token})
    return Checkpoint(folder, None, str(model), trust_remote_code)


def _download_described(repo_id: str, patterns: list[str], options: dict[str, Any]) -> Path:
    """Download files of a repository that has a config.json; raise FileNotFoundError or ValueError for another one."""
    folder = download(repo_id, patterns, **options)
    check_documents(folder)
    _refuse_adapter(folder, repo_id)
    if not (folder / "config.json").is_file():
        _refuse_files(repo_id, repository_files(repo_id, folder, **options), ":")
    return folder


def _refuse_files(source: str, names: Sequence[str], separator: str, problem: str = "holds GGUF files") -> NoReturn:
    """Raise an error that names the files of a folder or repository without a model's config or weights."""
    files = [name for name in names if name.endswith(GGUF)]
    if files:
        first = f"{source.rstrip('/')}{separator}{files[0]}"
        raise ValueError(f"{source} {problem}; name one of them, as {first}; it has {', '.join(files)}")
    if "config.json" not in names:
        raise FileNotFoundError(f"{source} holds no config.json; name a checkpoint folder, a .gguf file or a Hub id")
    refuse_without_weights(names, source)


def _refuse_adapter(folder: Path, source: str) -> None:
    """Refuse a folder with an adapter: transformers would load it with the weights only if PEFT is installed."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return
    if (folder / "config.json").is_file():
        raise ValueError(
            f"{source} holds a checkpoint and a PEFT adapter; move the adapter's files to another folder ADAPTER, and to merge it: "
            f"{_MERGE.format(source, 'ADAPTER')}"
        )
    base = read_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    raise ValueError(
        f"{source} is a PEFT adapter, not a checkpoint; merge it into the model that it is for: {_MERGE.format(base or 'BASE', source)}"
    )
