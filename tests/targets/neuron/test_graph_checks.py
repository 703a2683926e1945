# SPDX-License-Identifier: Apache-2.0
"""What stands beside a lowered graph is compared with the manifest and the weights before the graph is loaded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_config

from optimum_neuron.artifact.artifact import Artifact, ArtifactError
from optimum_neuron.artifact.manifest import describe_graph
from optimum_neuron.step.attention.state import KeyValueState
from optimum_neuron.step.features.convolution.state import ConvolutionState
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.spec import GraphSpec, TensorSpec, graph_specs, sampler_inputs
from optimum_neuron.step.state_specs import state_specs
from optimum_neuron.targets.neuron.graphs.checks import check_graphs, check_weights, graph_names
from optimum_neuron.targets.neuron.graphs.io import COPIES, KEEP_STATE, SAMPLERS, GraphIO, read_graph_io
from optimum_neuron.targets.neuron.graphs.state_graphs import COPY_INPUTS


CONFIG, MODEL = tiny_config(target="hlo"), ModelSpec(300, (KeyValueState(0, 2, 16, 16),), num_embeddings=300)
SPECS = graph_specs(CONFIG)
WEIGHT = {"name": "model.a", "role": "weight", "shape": [3, 4], "dtype": "float32"}
ARTIFACT = Artifact(
    Path("artifact"),
    {
        "config": CONFIG.to_dict(),
        "model": MODEL.to_dict(),
        "target": "hlo",
        "graphs": {spec.name: describe_graph(spec, MODEL) for spec in SPECS},
    },
)
CHOSEN = TensorSpec("chosen.tokens", (CONFIG.batch_size,), "int32")
ROWS = {"decode": CONFIG.batch_size, "chunk": CONFIG.ctx_batch_size}


def document_of(inputs: list[dict[str, Any]], outputs: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A description as it is read from a file."""
    document = {"inputs": inputs, "outputs": outputs, "unused_inputs": [], "hlo_sha256": "0" * 64, "world_size": 1}
    return dict(json.loads(json.dumps(document | more)))


def inputs_of(role: str, *specs: TensorSpec) -> list[dict[str, Any]]:
    return [dataclasses.asdict(each) | {"role": role} for each in specs]


def outputs_of(*specs: TensorSpec, renew: bool = False) -> list[dict[str, Any]]:
    return [
        {"name": each.name, "shape": [*each.shape], "dtype": each.dtype, "alias_of": each.name if renew else None}
        for each in specs
    ]


def described(spec: GraphSpec) -> dict[str, Any]:
    groups = ["decode"] * spec.has_decode + ["chunk"] * spec.has_chunk
    scores = [TensorSpec(f"scores.{group}", (ROWS[group], 300), "float32") for group in groups]
    states = (*state_specs(CONFIG, MODEL), *scores, CHOSEN)
    inputs = [*inputs_of("input", *spec.inputs()), *inputs_of("state", *states), WEIGHT]
    outputs = [*outputs_of(*spec.outputs(300)), *outputs_of(*states, renew=True)]
    return document_of(inputs, outputs, spec=dataclasses.asdict(spec))


def sampler(group: str) -> dict[str, Any]:
    rows = (ROWS[group],)
    score, slots = TensorSpec(f"scores.{group}", (*rows, 300), "float32"), TensorSpec(f"{group}.slots", rows, "int32")
    inputs = [*inputs_of("input", *sampler_inputs(group, *rows), slots), *inputs_of("state", score, CHOSEN)]
    tokens = TensorSpec(f"{group}.tokens", rows, "int32")
    return document_of(inputs, [*outputs_of(tokens), *outputs_of(CHOSEN, renew=True)])


# Of a slot: the last inputs of a convolution, `[batch_size + 1, past, channels]`.
KEEPING = dataclasses.replace(MODEL, states=(*MODEL.states, ConvolutionState(1, 0, 2, 6)))
CONV = TensorSpec("kv_cache.conv_1_0", (4, 2, 6), "float32")
KEPT = TensorSpec(f"snapshots.{CONV.name}", (5, 2, 6), "float32")
KEEPER = Artifact(
    ARTIFACT.path,
    ARTIFACT.manifest
    | {"config": dataclasses.replace(CONFIG, state_snapshots=5).to_dict(), "model": KEEPING.to_dict()},
)


def keeper() -> dict[str, Any]:
    inputs = [*inputs_of("input", *COPY_INPUTS), *inputs_of("state", CONV, KEPT)]
    return document_of(inputs, outputs_of(KEPT, renew=True))


def check(name: str, document: dict[str, Any]) -> None:
    check_graphs(KEEPER if name == KEEP_STATE else ARTIFACT, {name: GraphIO.from_dict(document)})


STEP, SAMPLER = SPECS[0].name, SAMPLERS["decode"]
MADE = {STEP: lambda: described(SPECS[0]), SAMPLER: lambda: sampler("decode"), KEEP_STATE: keeper}


def test_graphs_that_are_the_manifests_are_taken() -> None:
    check_graphs(ARTIFACT, {spec.name: GraphIO.from_dict(described(spec)) for spec in SPECS})
    assert graph_names(ARTIFACT) == (*(spec.name for spec in SPECS), *SAMPLERS.values(), COPIES[0])
    check_graphs(ARTIFACT, {SAMPLERS[group]: GraphIO.from_dict(sampler(group)) for group in ROWS})
    assert graph_names(KEEPER)[-3:] == COPIES
    without = Artifact(ARTIFACT.path, KEEPER.manifest | {"config": CONFIG.to_dict()})
    assert graph_names(without) == graph_names(ARTIFACT)[:-1]
    check(KEEP_STATE, keeper())


def test_a_graph_of_before_its_spec_was_written_is_checked_by_what_it_has() -> None:
    document = described(SPECS[0])
    del document["spec"]
    check(STEP, document)
    document["inputs"][0]["shape"] = [7, 1]
    with pytest.raises(ArtifactError, match=r"takes \('decode\.input_ids', \(7, 1\), 'int32'\), and the manifest"):
        check(STEP, document)


def state(document: dict[str, Any], name: str = "kv_cache.key_0") -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in document["inputs"] if each["name"] == name)
    return found


def put(part: str, number: int, **fields: object) -> Callable[[dict[str, Any]], object]:
    return lambda document: document[part][number].update(fields)


def drop_chosen(document: dict[str, Any]) -> None:
    for part in ("inputs", "outputs"):
        document[part] = [each for each in document[part] if each["name"] != CHOSEN.name]


SCORES = {"name": "scores.decode", "shape": [3, 300], "dtype": "float32", "alias_of": "scores.decode"}
NO_VALUE, NO_CHOSEN = r"not a new value of each state", "keeps no chosen tokens, as graphs of earlier versions did not"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (STEP, lambda d: d["spec"].update(batch_size=7), r"lowered for batch_size=7, and the manifest says 3"),
        (STEP, lambda d: d.update(world_size=2), r"it is for 2 ranks, not 1"),
        (STEP, lambda d: d["inputs"].pop(0), r"it takes .*, and the manifest asks for"),
        (STEP, lambda d: d["inputs"].insert(0, d["inputs"].pop(1)), r"it takes \('decode\.position_ids'"),
        (STEP, put("inputs", 0, dtype="int64"), r"it takes .*'int64'"),
        (STEP, put("outputs", 1, shape=[3, 299]), r"it returns .*\(3, 299\)"),
        (STEP, lambda d: state(d).update(shape=[4, 4, 64, 16]), r"it keeps .*\(4, 4, 64, 16\)"),
        (STEP, lambda d: d["inputs"].remove(state(d)), r"it keeps"),
        (STEP, lambda d: state(d, "scores.decode").update(shape=[3, 299]), r"it keeps .*\(3, 299\)"),
        (STEP, lambda d: d["inputs"].remove(state(d, "scores.decode")), r"it keeps"),
        (STEP, lambda d: d["inputs"].append(WEIGHT), r"have one name"),
        (STEP, lambda d: d["outputs"].pop(), NO_VALUE),
        (STEP, put("outputs", -1, shape=[1]), r"it updates .*\(1,\)"),
        (STEP, put("outputs", -1, alias_of="decode.input_ids"), NO_VALUE),
        (STEP, drop_chosen, f"{NO_CHOSEN}; export the model again"),
        (SAMPLER, put("inputs", 3, shape=[3, 299]), r"keeps \('scores.decode', \(3, 299\)"),
        (SAMPLER, put("inputs", 3, name="scores.chunk"), r"keeps \('scores.chunk'"),
        (SAMPLER, put("inputs", 4, name="kv_cache.key_0"), NO_CHOSEN),
        (SAMPLER, put("outputs", 1, shape=[4]), r"updates \('chosen.tokens', \(4,\)"),
        (SAMPLER, put("inputs", 0, shape=[4, 4]), r"takes \('decode.sampling_params', \(4, 4\)"),
        (SAMPLER, put("outputs", 0, shape=[4]), r"returns \('decode.tokens', \(4,\)"),
        (SAMPLER, put("outputs", 0, alias_of="scores.decode"), r"it returns 0 tensors"),
        (SAMPLER, lambda d: d["outputs"].append(SCORES), NO_VALUE),
        (KEEP_STATE, put("inputs", 4, shape=[4, 2, 6]), r"it keeps \('snapshots.kv_cache.conv_1_0', \(4, 2, 6\)"),
        (KEEP_STATE, put("inputs", 3, shape=[3, 2, 6]), r"it keeps \('kv_cache.conv_1_0', \(3, 2, 6\)"),
        (KEEP_STATE, put("inputs", 0, name="copy.slot"), r"it takes \('copy.slot'"),
        (KEEP_STATE, put("outputs", 0, alias_of=CONV.name), NO_VALUE),
        (KEEP_STATE, put("outputs", 0, alias_of=None), r"it returns 1 tensors, and the manifest asks for 0"),
    ],
)
def test_a_graph_of_another_manifest_is_refused(
    name: str, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    document = MADE[name]()
    change(document)
    with pytest.raises(ArtifactError, match=words) as caught:
        check(name, document)
    assert name in str(caught.value)


@pytest.mark.parametrize("value", [None, True, "4; abort()", -1, 1.5, 2**40, {}])
@pytest.mark.parametrize(
    "field", ["inputs", "outputs", "unused_inputs", "hlo_sha256", "world_size", "role", "dtype", "shape"]
)
def test_a_description_of_other_types_is_refused(tmp_path: Path, field: str, value: object) -> None:
    document = described(SPECS[0])
    place = document["inputs"][0] if field in ("role", "dtype", "shape") else document
    place[field] = value
    (tmp_path / "a.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"a\.json describes no graph: .*; export the model again"):
        read_graph_io(tmp_path / "a.hlo")


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.ones(4, 3), r"has model\.a as float32 \[4, 3\], and a graph takes it as float32 \[3, 4\]"),
        (torch.ones(3, 4, dtype=torch.int32), r"has model\.a as int32"),
        (None, r"lacks model\.a, which a graph needs"),
    ],
)
def test_weights_that_a_graph_does_not_take_are_refused(tensor: torch.Tensor | None, words: str) -> None:
    io = GraphIO.from_dict(described(SPECS[0]))
    check_weights("file", {"model.a": torch.ones(3, 4)}, [io])
    with pytest.raises(ValueError, match=words):
        check_weights("file", {} if tensor is None else {"model.a": tensor}, [io])
