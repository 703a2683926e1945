# SPDX-License-Identifier: Apache-2.0
"""What a rank's process is to load: every field is checked before a runtime sees one, whoever wrote it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st

from optimum_neuron.targets.neuron.rank.plan import HALVES, RankGraph, RankPlan, RankTensor, RankWeight
from optimum_neuron.targets.neuron.rank.wire import RankError
from optimum_neuron.targets.neuron.rank.worker import _load_graphs


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> RankPlan:
    folder = tmp_path_factory.mktemp("rank")
    (folder / "weights.safetensors").write_bytes(bytes(256))
    (folder / "step.neff").write_bytes(b"code")
    inputs = (
        RankTensor("tokens", "input", (2, 4), "int32", 0),
        RankTensor("kv_cache.key_0", "state", (2, 2, 8, 4), "bfloat16"),
        RankTensor("model.head", "weight", (4, 8), "float32"),
    )
    outputs = (
        RankTensor("logits", "output", (2, 8), "float32", 64),
        RankTensor("key", "output", (2, 2, 8, 4), "bfloat16", None, "kv_cache.key_0"),
    )
    weights = (RankWeight(("model.head", "model.tied"), str(folder / "weights.safetensors"), 64, (4, 8), "float32"),)
    return RankPlan("nrtpy", (0,), 1, 128, (weights,), {"step": RankGraph(str(folder / "step.neff"), inputs, outputs)})


def as_json(plan: RankPlan) -> Any:
    return json.loads(json.dumps(plan.to_dict()))


def test_a_plan_is_read_as_it_was_sent(plan: RankPlan) -> None:
    assert RankPlan.from_dict(as_json(plan)) == plan


CONTRADICTIONS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "another runtime": (("runtime",), "os.system"),
    "no rank": (("ranks",), []),
    "a rank of another world": (("ranks",), [1]),
    "a world without end": (("world_size",), 0),
    "less memory": (("memory",), 127),
    "memory without end": (("memory",), 2**60),
    "no memory": (("memory",), 0),
    "weights of no rank": (("weights",), []),
    "weights without a name": (("weights", 0, 0, "names"), []),
    "weights of other names": (("weights", 0, 0, "names"), ["model.other"]),
    "weights of another shape": (("weights", 0, 0, "shape"), [8, 4]),
    "weights behind the file": (("weights", 0, 0, "offset"), 256),
    "weights before the file": (("weights", 0, 0, "offset"), -1),
    "weights of no file": (("weights", 0, 0, "path"), "/nowhere/weights.safetensors"),
    "weights of a device": (("weights", 0, 0, "path"), "/dev/zero"),
    "a path of this folder": (("weights", 0, 0, "path"), "pyproject.toml"),
    "code of no file": (("graphs", "step", "neff"), "step.neff"),
    "objects": (("graphs", "step", "inputs", 0, "dtype"), "object"),
    "a size below zero": (("graphs", "step", "inputs", 0, "shape"), [-2, -4]),
    "sizes without end": (("graphs", "step", "inputs", 0, "shape"), [2**31, 2**31, 0, 2**62]),
    "a place behind the memory": (("graphs", "step", "inputs", 0, "place"), 128),
    "a place before the memory": (("graphs", "step", "outputs", 0, "place"), -64),
    "an odd place": (("graphs", "step", "outputs", 0, "place"), 65),
    "an input of no place": (("graphs", "step", "inputs", 0, "place"), None),
    "a weight in shared memory": (("graphs", "step", "inputs", 2, "place"), 0),
    "one name twice": (("graphs", "step", "inputs", 0, "name"), "model.head"),
    "another role": (("graphs", "step", "inputs", 1, "role"), "output"),
    "an output that is an input": (("graphs", "step", "outputs", 0, "role"), "input"),
    "a new value of nothing": (("graphs", "step", "outputs", 1, "alias_of"), "kv_cache.key_1"),
    "a new value of a weight": (("graphs", "step", "outputs", 1, "alias_of"), "model.head"),
    "a result over an input": (("graphs", "step", "outputs", 0, "place"), 0),
    "a new value of another type": (("graphs", "step", "outputs", 1, "dtype"), "float16"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_field_that_contradicts_another_is_refused(plan: RankPlan, name: str) -> None:
    place, value = CONTRADICTIONS[name]
    with pytest.raises(ValueError, match=r"^(it|two|no file|\S+ (has|is|lies|of)) ") as caught:
        RankPlan.from_dict(replaced(as_json(plan), place, value))
    assert "\n" not in str(caught.value)


def replaced(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(document)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return changed


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if place:
        yield place
    for key, inner in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from places(inner, (*place, key))


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 200), st.integers(), st.floats(), st.text(max_size=5), st.just([]), st.just({}),
    st.sampled_from(["input", "state", "weight", "output", "float32", "int8", "kv_cache.key_0", "model.head", "tokens"]),
)  # fmt: skip


def test_a_changed_plan_is_refused_or_stays_in_memory_and_files(plan: RankPlan) -> None:
    document = as_json(plan)
    spots = list(places(document))

    @examples(1200)
    @given(st.lists(st.tuples(st.sampled_from(spots), ANYTHING), min_size=1, max_size=2))
    def check(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
        changed = document
        for place, value in changes:
            try:
                changed = replaced(changed, place, value)
            except (TypeError, KeyError, IndexError):
                return  # the first change took the place of the second
        try:
            read = RankPlan.from_dict(changed)
        except ValueError as error:
            assert "\n" not in str(error)
            return
        for graph in read.graphs.values():
            assert Path(graph.neff).is_file()
            for tensor in (*graph.inputs, *graph.outputs):
                assert tensor.place is None or 0 <= tensor.place <= tensor.place + tensor.nbytes <= read.memory
        for weight in (each for weights in read.weights for each in weights):
            assert weight.read_array().shape == weight.shape

    check()


def test_a_rank_tells_that_it_could_not_read_what_to_load(plan: RankPlan) -> None:
    with pytest.raises(RankError, match="it maps 0 bytes") as caught:
        _load_graphs(as_json(plan) | {"memory": 0}, -1)
    assert caught.value.doing == "reading what to load"
    assert HALVES * plan.memory == 256
