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
    model: str | Path,
    *,
    revision: str | None,
    token: str | bool | None,
    trust_remote_code: bool,
    weights: bool = True,
    **hub: Any,
) -> Checkpoint:
    """Find a Hub id, a folder or a .gguf file, local or as `org/repo:file.gguf`; download only what an export reads.

    Without `weights` only the config is downloaded, and a GGUF file, which holds it. `hub` are options of the Hub's download functions. Raise
    FileNotFoundError where nothing has that name; ValueError for an adapter, for one of several GGUF files, and a revision of a local path.
    """
    path, source = Path(model).expanduser(), str(model)
    if not source:
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
        return Checkpoint(path.parent, path.name, source, trust_remote_code)
    if path.is_file():
        raise FileNotFoundError(f"{path} is a file of another kind; name a folder, a .gguf file or a Hub id")
    is_local, folder = path.is_dir(), path
    if not is_local:
        patterns = (*VERBATIM, SINGLE_NAME, CARD_NAME) if weights else ("config.json", ADAPTER_CONFIG, INDEX_NAME)
        folder = download(source, [*patterns, *(CODE_FILES if trust_remote_code else ())], **options)
    check_documents(folder)
    _refuse_adapter(folder, source)
    has_weights = is_local or not weights or any((folder / name).is_file() for name in (SINGLE_NAME, INDEX_NAME))
    if not has_weights or not (folder / "config.json").is_file():
        names = [each.name for each in path.iterdir()] if is_local else repository_files(source, folder, **options)
        _refuse_files(source, sorted(names), "/" if is_local else ":")
    if weights and not is_local and not (folder / SINGLE_NAME).is_file():
        files = sorted(map(glob.escape, set(indexed(folder / INDEX_NAME).values())))
        download(source, files, **options | {"revision": commit_of(folder, revision)})
    return Checkpoint(folder, None, source, trust_remote_code)


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
