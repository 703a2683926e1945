# SPDX-License-Identifier: Apache-2.0
"""Records: digests of what exports and the scheduler make, without what differs between machines, with the versions that graphs depend on."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from helpers import tiny_config
from records.models import MODELS, TinyModel
from records.schedules import digest, digest_schedules
from torch.export import ExportedProgram

from optimum_neuron import NeuronConfig, export_model
from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.artifact.quantization import QUANTIZATION_NAME
from optimum_neuron.step.attention.kv_cache import KVCache
from optimum_neuron.step.program import export_layers_once
from optimum_neuron.step.sampling.buffers import Scores
from optimum_neuron.step.spec import graph_specs
from optimum_neuron.step.state_specs import state_specs
from optimum_neuron.targets.cache.store import CompileCache
from optimum_neuron.targets.neuron.lowering.decompositions import decompose
from optimum_neuron.targets.neuron.lowering.lower_all import rank_model


Digests = dict[str, str]
# What the graphs for devices are lowered from, which needs no torch-xla; and HLO, which needs it.
PROGRAMS, HLO = "programs", "hlo"
# Of a manifest: where the artifact came from, which versions made it, and digests of files that have their own here.
_NOT_COMPARED = ("source", "origin", "versions", "adapters", "files")
# Of a plan's file: the number of its layout, and a digest of the file itself.
_NOT_OF_THE_PLAN = ("format", "sha256")


def targets() -> list[str]:
    """Return what this environment can make of a model."""
    return ["cpu", "eager", PROGRAMS, *([HLO] if importlib.util.find_spec("torch_xla") else [])]


def digest_model(name: str, wanted: Iterable[str]) -> dict[str, Digests]:
    """Export a model to each of some `targets()`, and return the digests by target and file."""
    with tempfile.TemporaryDirectory() as folder:
        named = MODELS[name].write(Path(folder))
        return {target: dict(_digests(MODELS[name], named, target, Path(folder))) for target in wanted}


def _digests(model: TinyModel, named: dict[str, Any], target: str, folder: Path) -> Iterator[tuple[str, str]]:
    exported = "eager" if target == PROGRAMS else target
    config = tiny_config(target=exported, **model.options)
    # A plan from the cache would be that of other sources where a key lacks one.
    with patch.object(CompileCache, "fetch", return_value=False):
        artifact = export_model(**named, output=folder / exported, config=config, overwrite=True)
    if target == PROGRAMS:
        yield from _program_digests(Artifact.open(artifact), tiny_config(target=HLO, **model.options))
        return
    yield "manifest", _digest_of_json(Artifact.open(artifact).manifest, _NOT_COMPARED)
    for path in sorted(artifact.rglob("*")):
        file = path.relative_to(artifact).as_posix()
        if path.is_file() and (file.startswith(("graphs/", "weights/")) or file == QUANTIZATION_NAME):
            is_plan = target == "cpu" and path.suffix == ".json" and file != QUANTIZATION_NAME
            data = path.read_bytes()
            yield file, _digest_of_json(json.loads(data), _NOT_OF_THE_PLAN) if is_plan else digest(data)


def _digest_of_json(document: Mapping[str, Any], without: Sequence[str]) -> str:
    kept = {name: value for name, value in document.items() if name not in without}
    return digest(json.dumps(kept, sort_keys=True).encode())


def _program_digests(artifact: Artifact, config: NeuronConfig) -> Iterator[tuple[str, str]]:
    """Yield a digest of each step graph that a Neuron target would lower to HLO."""
    rank = rank_model(artifact.path, config, artifact.tied_weights, trust_remote_code=False)
    cache = KVCache(state_specs(config, rank.spec))
    for spec in graph_specs(config):
        scores = Scores.for_graph(spec, rank.columns)
        program = export_layers_once(rank.model, cache, spec, rank.ops, scores, decompose)
        yield spec.name, digest("\n".join(_lines(program)).encode())


def _lines(program: ExportedProgram) -> Iterator[str]:
    """Yield a line for each input, constant and operation of a program, without names of files."""
    for each in (*program.graph_signature.input_specs, *program.graph_signature.output_specs):
        yield f"{each.kind} {each.arg} {each.target}"
    for name, tensor in sorted(program.constants.items()):
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        yield f"{name} {tensor.dtype} {tuple(tensor.shape)} {digest(data)}"
    for node in program.graph.nodes:
        yield f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {_shapes(node.meta.get('val'))}"


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return [_shapes(each) for each in value] if isinstance(value, list | tuple) else value


Record = dict[str, Any]


def versions() -> dict[str, str]:
    """Return what the graphs of a model depend on, apart from this package."""
    return {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}


def make_record(models: Sequence[str], wanted: Sequence[str]) -> Record:
    found = {name: digest_model(name, wanted) for name in models}
    return {"versions": versions(), "schedules": digest_schedules(), "models": found}


def compare(file: Path) -> list[str]:
    """Make the digests of a record again; return what differs, as `differences` does."""
    expected = json.loads(file.read_text(encoding="utf-8"))
    found = {name: digest_model(name, wanted) for name, wanted in expected["models"].items()}
    return differences(expected, {"versions": versions(), "schedules": digest_schedules(), "models": found})


def differences(expected: Record, found: Record) -> list[str]:
    """Return a line for each entry that differs, and for each that only one of two records of the same models has."""
    theirs, ours = dict(_entries(expected)), dict(_entries(found))
    return [
        f"{name}: {ours.get(name, 'nothing')} instead of {theirs.get(name, 'nothing')}"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    ]


def _entries(record: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(record, Mapping):
        for key, value in record.items():
            yield from _entries(value, f"{name}, {key}" if name else key)
    elif isinstance(record, list):
        for number, value in enumerate(record):
            yield from _entries(value, f"{name}, part {number}")
    else:
        yield name, record
