# SPDX-License-Identifier: Apache-2.0
"""The artifact folder, read and verified. Files are data until a target loads them.

config.json generation_config.json tokenizer files     verbatim from the checkpoint, but for the tokenizer's model_max_length
neuron_config.json                                      the manifest, written last
graphs/<name>.<suffix>                                  compiled graphs, if the target has files
weights/model.safetensors                               parameters and constant buffers, by name;
weights/tp<rank>.safetensors                            or each rank's shards of them
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from ..config import NeuronConfig
from ..step.model_spec import ModelSpec
from ..step.spec import GraphSpec, TensorSpec, graph_specs
from ..step.state_specs import kept_state_specs, state_specs
from .filesystem import file_sha256
from .manifest import check_manifest, config_of
from .schema import read_object, shown


MANIFEST_NAME = "neuron_config.json"
WEIGHTS_FOLDER = "weights"
WEIGHTS_NAME = "weights/model.safetensors"
GRAPHS_FOLDER = "graphs"
FORMAT = "optimum-neuron-runtime"
# Folders of a repository in the Hub's cache: of commits, with links, and of the files that they lead to.
HUB_FOLDERS = ("snapshots", "blobs")
# A repository of the Hub, or a file of one.
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(?::.+\.gguf)?")
# 2: a slot keeps more than keys and values, which a reader of 1 would overlook.
FORMAT_VERSION = 6
# The manifest lists every file of these folders; next to them a repository may hold a README and the like.
OWNED_FOLDERS = (GRAPHS_FOLDER, WEIGHTS_FOLDER)


class ArtifactError(ValueError):
    """A folder that is no usable artifact; the message names the file and the remedy."""


@dataclass(frozen=True)
class Artifact:
    """A folder with a read manifest, and files that were checked for presence and size.

    `verify` checks their contents, except those of weights, which `read_weights` checks.
    """

    path: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, path: str | Path, *, with_graphs: bool = True) -> Artifact:
        """Read the manifest; `with_graphs=False` neither expects nor reads the compiled graphs.

        Raises FileNotFoundError if there is no such folder, or it holds no manifest; ArtifactError if this version
        cannot honour the manifest, or files are missing, truncated, renamed or foreign.
        """
        path = Path(path)
        manifest = read_manifest(path)
        if not with_graphs:
            files = {name: entry for name, entry in manifest["files"].items() if not is_graph_file(name)}
            manifest = manifest | {"files": files}
        artifact = cls(path, manifest)
        artifact._check_files()
        return artifact

    @cached_property
    def config(self) -> NeuronConfig:
        return config_of(self.manifest)

    @cached_property
    def graphs(self) -> tuple[GraphSpec, ...]:
        """The graphs that the artifact was made for, derived from its config."""
        return graph_specs(self.config)

    @cached_property
    def model(self) -> ModelSpec:
        return ModelSpec.from_dict(self.manifest["model"])

    @property
    def target(self) -> str:
        return self.manifest["target"]

    @property
    def tied_weights(self) -> dict[str, str]:
        """Names of parameters that share the storage of another: alias to stored name."""
        return self.manifest["tied_weights"]

    def states(self) -> tuple[TensorSpec, ...]:
        return state_specs(self.config, self.model)

    def kept_states(self) -> tuple[TensorSpec, ...]:
        """Return places for copies of slots' states; none where slots keep only keys and values."""
        return kept_state_specs(self.config, self.model)

    def file(self, name: str) -> Path:
        if name not in self.manifest["files"]:
            raise ArtifactError(f"{self.path / MANIFEST_NAME} lists no file {name}; export the model again")
        return self.path / name

    def graph_file(self, name: str) -> Path:
        """Return the path of a file of compiled graphs by its own name: no other file of the folder is ever loaded."""
        return self.file(f"{GRAPHS_FOLDER}/{name}")

    def sha256(self, name: str) -> str:
        return self.manifest["files"][name]["sha256"]

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Compare the contents of files (default: all but the weights) with their recorded digests; raise ArtifactError for another one."""
        for name in self.manifest["files"] if names is None else names:
            if not is_weight_file(name):
                self.check_digest(name, file_sha256(self.file(name)))

    def verify_described(self) -> None:
        """Verify all files but weights and compiled graphs: those that describe the model and its texts."""
        self.verify(name for name in self.manifest["files"] if not is_graph_file(name))

    def check_digest(self, name: str, digest: str) -> None:
        """Raise ArtifactError where `digest` is not the recorded one."""
        if digest != self.sha256(name):
            raise ArtifactError(
                f"{self.path / name} was changed after the export: its sha256 is {digest[:12]}…, the manifest says "
                f"{self.sha256(name)[:12]}…; restore the file or export the model again"
            )

    def _check_files(self) -> None:
        files = self.manifest["files"]
        owned = {PurePosixPath(name).parts[0] for name in files if "/" in name} & set(OWNED_FOLDERS)
        missing = [name for name in files if not (self.path / name).is_file()]
        present = {
            f"{folder}/{entry.name}"
            for folder in owned
            if (self.path / folder).is_dir()
            for entry in (self.path / folder).iterdir()
        }
        foreign = sorted(present - set(files))
        for name in missing:
            for other in foreign:
                if file_sha256(self.path / other) == self.sha256(name):
                    raise ArtifactError(f"{self.path / name} was renamed to {other}; give it its old name back")
            raise ArtifactError(f"{self.path / name} is missing; copy it again or export the model again")
        if foreign:
            raise ArtifactError(f"{self.path / foreign[0]} does not belong to this artifact; remove it")
        for name, entry in files.items():
            self._check_inside(name)
            size = (self.path / name).stat().st_size
            if size != entry["size"]:
                state = "truncated" if size < entry["size"] else "longer than it was"
                raise ArtifactError(
                    f"{self.path / name} is {state}: {size:,} bytes, the manifest says {entry['size']:,}; copy it again "
                    f"or export the model again"
                )

    def _check_inside(self, name: str) -> None:
        """Refuse a link to a file elsewhere, other than those by which the Hub's cache holds a repository's files."""
        folder, real = self.path.resolve(), (self.path / name).resolve()
        blobs = folder.parents[1] / HUB_FOLDERS[1] if folder.parent.name == HUB_FOLDERS[0] else folder
        if not real.is_relative_to(blobs.resolve()) and not real.is_relative_to(folder):
            raise ArtifactError(
                f"{self.path / name} is a link to {real}, which is outside of the artifact; put the file itself there"
            )


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the checked manifest of a folder, or raise as `Artifact.open` does."""
    where = path / MANIFEST_NAME
    if not where.is_file():
        raise FileNotFoundError(_what_it_is(path))
    try:
        manifest = read_object(where)
    except ValueError as error:
        raise ArtifactError(f"{where} is not valid JSON ({error}); export the model again") from error
    if manifest.get("format") != FORMAT:
        raise ArtifactError(
            f"{where} has format {shown(manifest.get('format'))}, not {FORMAT!r}: it was made by another program; export "
            f"the model again"
        )
    version = manifest.get("format_version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise ArtifactError(
            f"{where} has format_version {shown(version)}, this program reads 1 to {FORMAT_VERSION}; export the model "
            f"again or install the version that made it"
        )
    try:
        check_manifest(manifest)
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"{where} cannot be honoured: {error}; export the model again") from error
    return manifest


def _what_it_is(path: Path) -> str:
    export = f"optimum-cli export neuron --model {path} OUT"
    if path.suffix == ".gguf" and path.is_file():
        return f"{path} is a GGUF file, not an artifact; export it first: {export}"
    if path.exists() and not path.is_dir():
        return f"{path} is a file, not an artifact; name the folder that optimum-cli export neuron wrote"
    if (path / "config.json").is_file():
        return f"{path} holds no {MANIFEST_NAME}, so it is a checkpoint or an unfinished copy, not an artifact; export it first: {export}"
    if path.is_dir():
        return f"{path} holds no {MANIFEST_NAME}; name the folder that optimum-cli export neuron wrote"
    if _HUB_ID.fullmatch(str(path)):
        download = f"; if it is an artifact there, download it: hf download {path} --local-dir OUT"
        return f"{path} is no folder here; if it is a checkpoint on the Hub, export it: {export}{'' if ':' in path.name else download}"
    return f"{path} does not exist; name the folder that optimum-cli export neuron wrote"


def format_version(model: dict[str, Any], config: dict[str, Any], *, quantized: bool) -> int:
    """Return the oldest version that can honour an artifact of this model and config, both as a manifest has them."""
    needed = {
        6: config.get("activations"),
        5: quantized,
        4: model.get("compressions"),
        3: model.get("recurrences"),
        2: model.get("convolutions") or model.get("selections"),
    }
    return next((version for version, is_needed in needed.items() if is_needed), 1)


def is_graph_file(name: str) -> bool:
    return name.startswith(GRAPHS_FOLDER + "/")


def is_weight_file(name: str) -> bool:
    return name.startswith(WEIGHTS_FOLDER + "/")
