# SPDX-License-Identifier: Apache-2.0
"""The graphs of an export that are compiled already, found by the model's config and the names in the cache alone.

Keys are those under which the target looks while it exports. They depend on which weights are one, and on types: both follow from a
config, except where a checkpoint contradicts its own.
"""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from transformers import PreTrainedModel

from ...artifact.quantization import write_formats
from ...artifact.skeleton import empty_model
from ...artifact.user_cache import cache_folder, cache_root
from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.files import INDEX_NAME, indexed
from ...checkpoints.find import find_checkpoint
from ...checkpoints.quantize.quantize import make_room_as_quantized, round_activations, settle_activations
from ...checkpoints.verbatim import write_config_alone
from ...config import NeuronConfig
from ...step.features.codes.modules import weight_formats
from .. import CacheKeys, Target, get_target, resolve_target
from .entries import CODE, BrokenError, check_code
from .hub import shared_entries


State = Literal["there", "missing", "broken"]


@dataclass(frozen=True)
class FoundGraph:
    """A graph of an export, and where it is compiled.

    `here` is the user's cache, each file checked by its digest; `shared` is a repository, of which files are only listed, if one is named.
    """

    graph: str
    key: str
    here: State
    shared: State | None

    @property
    def is_there(self) -> bool:
        return "there" in (self.here, self.shared)


def lookup(
    model: str | Path,
    config: NeuronConfig,
    *,
    revision: str | None = None,
    token: str | None = None,
    trust_remote_code: bool = False,
    repo: str | None = None,
    repo_revision: str | None = None,
) -> list[FoundGraph]:
    """Look for all graphs that an export would compile; compile nothing, and change nothing in the cache.

    Args:
        model: a Hub id or a folder with a config.json; its weights are not read.
        token: of the Hub, for the model and for `repo`.
        repo, repo_revision: where else to look, as in `hub.sync`.

    Raises:
        ValueError: the model or the options cannot be exported, its graphs depend on its weights, or the target keeps none.
        FileNotFoundError: there is no such model or repository.
        RuntimeError: this machine lacks what decides on graphs, such as the compiler, which has its version in keys; or the Hub fails.
        PermissionError: the cache is not to be trusted.
    """
    config = dataclasses.replace(config, target=resolve_target(config.target))
    target = get_target(config.target)
    if config.target == "hlo" or not target.keeps_graphs:
        raise ValueError(
            f"target={config.target!r} compiles nothing that is kept; name the target that is exported for"
        )
    if config.quantization == "checkpoint":
        raise ValueError(
            "quantization='checkpoint' gives weights types that only a checkpoint's files have, and its config alone is read here; export, "
            "and what the cache has is used"
        )
    checkpoint = find_checkpoint(
        model, revision=revision, token=token, trust_remote_code=trust_remote_code, weights=False
    )
    found = _find_keys(checkpoint, config, target)
    shared = None if repo is None else shared_entries(repo, revision=repo_revision, token=token)
    graphs = []
    for graph, key in found.keys.items():
        there: State | None = None
        if shared is not None:
            files = shared.get(f"{found.kind}/{key}")
            there = "missing" if files is None else "there" if CODE + found.suffix in files else "broken"
        graphs.append(FoundGraph(graph, key, _state_here(found, key), there))
    return graphs


def _find_keys(checkpoint: Checkpoint, config: NeuronConfig, target: Target) -> CacheKeys:
    if checkpoint.gguf_file is not None:
        raise ValueError(
            f"{checkpoint.source} has its config in one file with its weights, which are not read here; export it, and what the "
            f"cache has is used"
        )
    model_config = checkpoint.load_config()
    if checkpoint.is_quantized:
        raise ValueError(
            f"{checkpoint.source} is quantized, and an export keeps its codes, and their types are not known without its weights; export it, and "
            f"what the cache has is used"
        )
    config = config.fitted(checkpoint.longest_text(model_config))
    checkpoint.check_length(model_config, config.sequence_length)
    dtype = checkpoint.resolve_dtype(model_config, config.dtype)
    if dtype is None:
        raise ValueError(
            f"{checkpoint.source}: its config names no dtype, and its weights are not read; give --dtype (dtype=...)"
        )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_config_alone(checkpoint, folder)
        trusted = checkpoint.trust_remote_code
        model = cast(PreTrainedModel, empty_model(folder, dtype, trust_remote_code=trusted))
        _check_ties(checkpoint, model)
        make_room_as_quantized(model, config)
        config = settle_activations(model, config, by_default=target.rounds_activations())
        round_activations(model, config)
        write_formats(weight_formats(model), folder)
        config = dataclasses.replace(config, dtype=str(model.dtype).removeprefix("torch."))
        return target.cache_keys(model, config, folder, trust_remote_code=trusted)


def _check_ties(checkpoint: Checkpoint, model: PreTrainedModel) -> None:
    """Raise ValueError where a checkpoint has a tensor each for weights that its config ties: if they differ, they are not tied."""
    path = checkpoint.folder / INDEX_NAME
    # A single file without an index is not looked into. A multimodal model gives names any prefix.
    names = [f".{name}" for name in (indexed(path) if path.is_file() else ())]
    for alias, stored in model.all_tied_weights_keys.items():
        if all(any(each.endswith(f".{name}") for each in names) for name in (alias, stored)):
            raise ValueError(
                f"{checkpoint.source}: by its config {alias} is {stored}, and its files hold both; whether they are equal, which "
                f"decides on graphs, depends on weights, which are not read; correct tie_word_embeddings in its config.json"
            )


def _state_here(found: CacheKeys, key: str) -> State:
    if not (cache_root() / found.kind / key).is_dir():
        return "missing"
    entry = cache_folder(found.kind) / key
    try:
        return "there" if found.suffix in check_code(entry) else "broken"
    except BrokenError:
        return "broken" if entry.exists() else "missing"  # else another process made room meanwhile
