# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint comes from: a Hub id, a folder or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .card_facts import CARD_NAME
from .checkpoint import Checkpoint
from .files import CODE_FILES, INDEX_NAME, VERBATIM, check_documents, read_object
from .hub import download, refuse_revision


WEIGHT_FILES = ("*.safetensors", "*.index.json")
ADAPTER_CONFIG = "adapter_config.json"


def find_checkpoint(
    model: str | Path, *, revision: str | None, token: str | bool | None, trust_remote_code: bool, **hub: Any
) -> Checkpoint:
    """Resolves a Hub id, a folder or a .gguf file; a Hub repository is downloaded into the usual cache.

    Args:
        hub: `cache_dir`, `force_download` and `local_files_only` of the Hub's download functions.

    Raises:
        ValueError: a revision of a local path, or an adapter in the place of a checkpoint.
        FileNotFoundError: nothing of that name exists, here or on the Hub.
    """
    path = Path(model).expanduser()
    if path.exists():
        refuse_revision(path, revision)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist")
        return Checkpoint(path.parent, path.name, str(model), trust_remote_code)
    if path.is_file():
        raise FileNotFoundError(
            f"{path} is a file of another kind; name a checkpoint folder, a .gguf file or a Hub id"
        )
    if path.is_dir():
        check_documents(path)
        _refuse_adapter(path, str(model))
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{path} holds no config.json; name a checkpoint folder, a .gguf file or a Hub id")
        return Checkpoint(path, None, str(model), trust_remote_code)
    patterns = [*VERBATIM, *WEIGHT_FILES, CARD_NAME, *(CODE_FILES if trust_remote_code else ())]
    folder = download(str(model), patterns, revision=revision, token=token, **hub)
    check_documents(folder)
    _refuse_adapter(folder, str(model))
    return Checkpoint(folder, None, str(model), trust_remote_code)


def find_config(
    model: str | Path, *, revision: str | None, token: str | bool | None, trust_remote_code: bool
) -> Checkpoint:
    """As `find_checkpoint`, but of a Hub repository no weights are downloaded: only the config can be loaded, and an index of weights.

    Raises:
        FileNotFoundError: nothing of that name exists, here or on the Hub.
    """
    path = Path(model).expanduser()
    if path.exists() or path.suffix == ".gguf":
        return find_checkpoint(model, revision=revision, token=token, trust_remote_code=trust_remote_code)
    patterns = ["config.json", ADAPTER_CONFIG, INDEX_NAME, *(CODE_FILES if trust_remote_code else ())]
    folder = download(str(model), patterns, revision=revision, token=token)
    check_documents(folder)
    _refuse_adapter(folder, str(model))
    return Checkpoint(folder, None, str(model), trust_remote_code)


def _refuse_adapter(folder: Path, source: str) -> None:
    """transformers would load an adapter beside the weights, or not, as PEFT is installed or not."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return
    if (folder / "config.json").is_file():
        raise ValueError(
            f"{source} holds a checkpoint and a PEFT adapter; move the adapter's files into a folder of their own, and name it by "
            f"--adapter to merge it"
        )
    base = read_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    raise ValueError(
        f"{source} is a PEFT adapter, not a checkpoint; name the model that it was trained on: --model {base or 'BASE'} "
        f"--adapter {source}"
    )
