# SPDX-License-Identifier: Apache-2.0
"""The manifest of an artifact, and whether its parts agree; no other file is needed."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from ..checkpoints.origin import LANGUAGE, LICENSE, LICENSE_NAME, LINK
from ..config import TARGETS, NeuronConfig
from ..step.model_spec import KINDS, ModelSpec
from ..step.spec import GraphSpec, graph_specs
from ..step.state_specs import state_specs
from .schema import TEXT, Check, choice, first_difference, flag, listed, named, record, shown, text, whole


# A file's name and those of its folders are at most this long in common file systems.
_LONGEST_NAME = 255
_LARGEST_FILE = 2**63 - 1
# In earlier artifacts graphs choose among this many of the best tokens at most, by fewer parameters: they are compiled again.
_EARLIER_OPTION, _EARLIER_PARAMS = "max_topk", 3


def _sizes(kind: type) -> Check:
    """The sizes of a layer: all fields of a dataclass, of which those that number something may be 0; one with a default may be missing."""
    least = {"layer_idx": 0, "index": 0}
    sizes: tuple[dict[str, Check], dict[str, Check]] = {}, {}
    for field in dataclasses.fields(kind):
        sizes[field.default is not dataclasses.MISSING][field.name] = whole(least.get(field.name, 1))
    return record(*sizes, closed=True)


_STATES = {kind.section: listed(_sizes(kind)) for kind in KINDS}
_MODEL = record(
    {"vocab_size": whole(1), "layers": _STATES.pop("layers")}, {**_STATES, "num_embeddings": whole(1)}, closed=True
)
# A target knows itself which of these it wrote.
_TARGET_DATA = record(
    {},
    {
        "target": TEXT,
        "lnc": whole(1, 16),
        "versions": named(TEXT),
        "graphs": named(record({"kind": TEXT, "argv": listed(TEXT)})),
    },
)
# As `checkpoints.origin` writes it.
_ORIGIN = record(
    {},
    {
        "repo": text(r"[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)?"),
        "revision": text("[0-9a-f]{40}"),
        "license": text(LICENSE),
        "license_name": text(LICENSE_NAME),
        "license_link": text(LINK),
        "language": listed(text(LANGUAGE)),
        "dequantize": flag,
        "calibration": text("[0-9a-f]{64}"),
    },
)
_MANIFEST = record(
    {
        "config": record({}),
        "model": _MODEL,
        "target": choice(TARGETS[1:]),
        "task": choice(("text-generation",)),
        "versions": named(TEXT),
        "graphs": named(record({})),
        "tied_weights": named(TEXT),
        "target_data": _TARGET_DATA,
        "files": named(record({"sha256": text("[0-9a-f]{64}"), "size": whole(0, _LARGEST_FILE)})),
    },
    {"source": text("(?s).*"), "adapters": listed(record({})), "origin": _ORIGIN},
)


def check_manifest(manifest: Mapping[str, Any]) -> None:
    """Check types and ranges of a manifest, and that its parts agree; raise TypeError or ValueError for another one."""
    _MANIFEST("the manifest", manifest)
    for name in manifest["files"]:
        check_member(name)
    if "config.json" not in manifest["files"]:
        raise ValueError("it does not list config.json, so nothing vouches for that file")
    for alias, stored in manifest["tied_weights"].items():
        if stored in manifest["tied_weights"]:
            raise ValueError(
                f"tied_weights has {shown(alias)} tied to {shown(stored)}, which is itself tied to another"
            )
    config, model = config_of(manifest), ModelSpec.from_dict(manifest["model"])
    if config.target != manifest["target"] or "auto" in (config.dtype, config.activations):
        raise ValueError(
            f"its config has target={config.target!r}, dtype={config.dtype!r} and activations={config.activations!r}, where the "
            f"artifact's target {manifest['target']!r}, a type and a choice belong"
        )
    ranks = sum(PurePosixPath(name).parts[0] == "weights" for name in manifest["files"])
    if ranks != config.tensor_parallel_size:
        raise ValueError(
            f"it lists {ranks} files of weights, and has tensor_parallel_size={config.tensor_parallel_size}"
        )
    states = Counter(state.name for state in state_specs(config, model))
    for name, count in states.items():
        if count > 1:
            raise ValueError(f"model describes the state {name} twice")
    _check_graphs(manifest["graphs"], config, model, earlier_sampler=_EARLIER_OPTION in manifest["config"])


def config_of(manifest: Mapping[str, Any]) -> NeuronConfig:
    """Return the config of a manifest; raise TypeError or ValueError where it is none."""
    config = {name: value for name, value in manifest["config"].items() if name != _EARLIER_OPTION}
    # An artifact that does not mention an option was made without it; the default of a new export is another.
    return NeuronConfig.from_dict({"mixed_step": False, "activations": None} | config)


def describe_graph(graph: GraphSpec, model: ModelSpec) -> dict[str, Any]:
    """Return a graph's record in the manifest: its sizes, and its inputs and outputs for readers without this program."""
    tensors = {"inputs": graph.inputs(), "outputs": graph.outputs(model.vocab_size)}
    return dataclasses.asdict(graph) | {
        name: [{"name": each.name, "shape": list(each.shape), "dtype": each.dtype} for each in members]
        for name, members in tensors.items()
    }


def check_member(name: str) -> None:
    """Raise ValueError for a path that leaves the artifact folder or lies deeper than one folder."""
    parts = PurePosixPath(name).parts
    if (
        not parts
        or name != "/".join(parts)
        or any(character in name for character in "\\:")
        or not name.isprintable()
        or ".." in parts
        or len(parts) > 2
        or parts[0] == "/"
        or any(len(part.encode()) > _LONGEST_NAME for part in parts)
    ):
        raise ValueError(f"it names {shown(name)}, which is no path inside the artifact: do not use it")


def _check_graphs(
    recorded: Mapping[str, Any], config: NeuronConfig, model: ModelSpec, *, earlier_sampler: bool
) -> None:
    derived = {spec.name: spec for spec in graph_specs(config)}
    if sorted(recorded) != sorted(derived):
        raise ValueError(f"it lists the graphs {sorted(recorded)}, but its config asks for {sorted(derived)}")
    for name, spec in derived.items():
        described = describe_graph(spec, model)
        for each in described["inputs"] if earlier_sampler else ():
            if each["name"].endswith(".sampling_params"):
                each["shape"][1] = _EARLIER_PARAMS
        difference = first_difference(recorded[name], described)
        if difference is not None:
            field, found, expected = difference
            raise ValueError(
                f"graphs[{name!r}] has {field} {shown(found)}, and its config and model ask for {shown(expected)}"
            )
