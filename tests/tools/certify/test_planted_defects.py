# SPDX-License-Identifier: Apache-2.0
"""Mistakes of a lowering, planted one at a time: the certificate's comparison finds each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lowered_again import Case, make_case, places, wrap
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from optimum_neuron.artifact.weights import rank_weights_name
from optimum_neuron.step import step as step_module
from optimum_neuron.step.attention import coded_states
from optimum_neuron.step.attention.coded_states import CodedStates
from optimum_neuron.step.attention.rows import AttentionRows, OwnedBlocks
from optimum_neuron.step.sampling.buffers import ChosenTokens
from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.graphs.io import COPY_SLOT, SAMPLERS
from optimum_neuron.targets.neuron.lowering import decompositions, xla_trace
from optimum_neuron.targets.neuron.lowering import lower as score_module
from optimum_neuron.targets.neuron.lowering import lower_all as rank_model
from optimum_neuron.targets.neuron.lowering.lower import RowCopy
from optimum_neuron.targets.neuron.operators import attention, collectives
from optimum_neuron.tools.certify.host_ranks import LoweredModule


Plant = Callable[[pytest.MonkeyPatch], None]
BLOCKS = {
    "sequence_length": 256,
    "context_buckets": (256,),
    "kv_block_size": 64,
    "kv_cache_tokens": 512,
    "window": 100,
}
# By name: ranks, graphs and sizes of a case.
CASES: dict[str, tuple[int, tuple[str, ...], dict[str, Any]]] = {
    "plain": (1, ("mixed",), {}),
    "ranks": (2, ("mixed",), {"batch_size": 4}),  # an even number of tokens
    "blocks": (1, ("mixed", COPY_SLOT), BLOCKS),
    "blocks of ranks": (2, ("mixed",), BLOCKS),
    "codes": (1, ("mixed",), {"kv_cache_dtype": "fp8"}),
}


class Cases:
    """The cases of this file, each made and lowered once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._make, self._lower = cache(make_case), cache(self.lower)

    def __getitem__(self, name: str) -> Case:
        ranks, graphs, sizes = CASES[name]
        return self._make(self._folder / name, ranks, *graphs, **sizes)

    def sound(self, name: str, split: bool | None = None) -> dict[str, LoweredModule]:
        return self._lower(name, split)

    def lower(self, name: str, split: bool | None = None) -> dict[str, LoweredModule]:
        return self[name].lower(*CASES[name][1], split=split)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return Cases(tmp_path_factory.mktemp("cases"))


@pytest.mark.parametrize("name", ["plain", "blocks", "codes", pytest.param("blocks of ranks", marks=pytest.mark.full)])
def test_a_sound_lowering_holds(name: str, cases: Cases) -> None:
    comparisons = cases[name].compare(cases.sound(name))
    assert places(comparisons) == []
    subjects = {each.subject.split(": ")[-1] for each in comparisons}
    if name == "plain":
        assert subjects == {
            "decode.logits", "chunk.logits", "key", "value", "decode.tokens", "chunk.tokens",
            "decode.drawn", "chunk.drawn", "chosen.tokens", "chosen.drawn",
        }  # fmt: skip
    if name in ("plain", "blocks"):  # far from the bound, so that it is no matter of luck
        assert all(each.difference <= each.bound / 3 for each in comparisons)
    if name == "codes":  # though a graph may take another code for a number between two
        assert subjects >= {"decode.logits", "chunk.logits", "key", "value", "keyscale", "valuescale"}
    if name == "blocks":
        bases = [each.inputs.get("decode.shared_base") for each in cases[name].setup.steps]
        assert any((base < 256).any() for base in bases if base is not None)


def _wrapped(owner: Any, name: str, changed: Callable[..., Any]) -> Plant:
    return lambda monkeypatch: wrap(monkeypatch, owner, name, changed)


def _ops(**changed: Any) -> Plant:
    ops = dataclasses.replace(rank_model.NEURON_OPS, **changed)
    return lambda monkeypatch: monkeypatch.setattr(rank_model, "NEURON_OPS", ops)


def _mask_edge(original: Any, rows: AttentionRows, window: Any, start: int = 0, stop: int | None = None) -> Tensor:
    columns = torch.arange(start, rows.context_length if stop is None else stop, dtype=torch.int32)
    return original(rows, window, start, stop) & (columns != rows.position_ids[:, :, None])


def _owned(change: Callable[[OwnedBlocks], dict[str, Any]]) -> Plant:
    def changed(original: Any, *args: Any, **kwargs: Any) -> OwnedBlocks:
        found: OwnedBlocks = original(*args, **kwargs)
        return dataclasses.replace(found, **change(found))

    return _wrapped(step_module, "OwnedBlocks", changed)


def _coded(owner: Any, name: str, change: Callable[[CodedStates], CodedStates]) -> Plant:
    """Change codes where a function takes or returns them."""

    def changed(original: Any, *args: Any) -> Any:
        found = original(*(change(each) if isinstance(each, CodedStates) else each for each in args))
        return change(found) if isinstance(found, CodedStates) else found

    return _wrapped(owner, name, changed)


_write = rank_model.NEURON_OPS.write_cache
_LONGER = _wrapped(RowCopy, "forward", lambda original, self, *numbers: original(self, *numbers[:2], numbers[2] + 1))
PLANTED: dict[str, dict[str, Plant]] = {
    "plain": {
        "mask edge": _wrapped(AttentionRows, "visible", _mask_edge),
        "position off by one": _wrapped(
            Qwen2RotaryEmbedding, "forward", lambda original, module, x, position_ids: original(module, x, position_ids + 1)
        ),
        "wrong norm": _wrapped(
            decompositions, "_mean_by_sum", lambda original, *args, **kwargs: original(*args, **kwargs) * 1.0001
        ),
        "stale state": _ops(write_cache=lambda cache, states, rows, columns: _write(cache, states[:3], rows[:3], columns[:3])),
        "wrong slot": _wrapped(
            step_module, "write_indices",
            lambda original, positions, actual, slots, trash, offset: original(positions, actual, slots if offset == 0 else 2 - slots, trash, offset),
        ),
        "type cut": _wrapped(torch, "exp", lambda original, x: original(x).bfloat16().float()),
        "wrong output row": _ops(output_rows=lambda rows: (rows - 1).clamp(min=0)),
        "sampler without temperature": _wrapped(
            score_module, "sample",
            lambda original, logits, params, *others: original(logits, params * torch.tensor([1.0, 1.0, 0.0, 1.0]), *others),
        ),
        "token of another slot": _wrapped(
            ChosenTokens, "fill_ids",
            lambda original, self, input_ids: torch.where(input_ids < 0, self.tokens.flip(0)[:, None], input_ids),
        ),
        "idle row keeps": _wrapped(
            step_module, "slots_of_rows", lambda original, position_ids, seq_ids: original(position_ids.clamp(min=0), seq_ids)
        ),
    },
    "blocks": {
        "wrong owner": _owned(lambda owned: {"block_owner": owned.block_owner.roll(1)}),
        "base off by a block": _owned(lambda owned: {"block_base": owned.block_base + 64}),
        "a neighbor's block": _wrapped(
            step_module, "block_indices",
            lambda original, positions, actual, blocks, *others: original(
                positions, actual, blocks.flip(0) if blocks.shape[1] == 1 else blocks, *others
            ),
        ),
        "copied column": _LONGER,
    },
    "codes": {
        "scales of other columns": _coded(attention, "raw_scores", lambda kept: CodedStates(kept.codes, kept.scale.roll(1, -2))),
        "values without scales": _coded(attention, "weighted_sum", lambda kept: CodedStates(kept.codes, kept.scale * 0 + 1)),
        "another largest code": lambda monkeypatch: monkeypatch.setitem(coded_states.LARGEST_CODE, torch.float8_e4m3fn, 224.0),
    },
}  # fmt: skip
# One of attention, of states, of a type, of a sampler, of tokens left for later, of blocks and of codes; others by the full profile.
QUICK = (
    "mask edge", "stale state", "type cut", "sampler without temperature", "token of another slot", "wrong owner", "a neighbor's block",
    "copied column", "scales of other columns",
)  # fmt: skip


@pytest.mark.parametrize(
    ("case", "defect"),
    [
        pytest.param(case, name, marks=[] if name in QUICK else [pytest.mark.full])
        for case, defects in PLANTED.items()
        for name in defects
    ],
)
def test_a_planted_defect_is_found(case: str, defect: str, cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = cases[case]  # before anything is changed
    PLANTED[case][defect](monkeypatch)
    assert places(sound.compare(cases.lower(case)))


def _changed(modules: Mapping[str, LoweredModule], change: Callable[[Any], None]) -> dict[str, LoweredModule]:
    """Steps that are changed, and samplers as they are."""
    changed = dict(modules)
    for name in modules.keys() - set(SAMPLERS.values()):
        module = hlo.parse(modules[name].hlo)
        change(module)
        changed[name] = LoweredModule(hlo.serialize(module), modules[name].io)
    return changed


def _swap_memory(module: Any) -> None:
    one, other = module.input_output_alias.entries[:2]
    one.parameter_number, other.parameter_number = other.parameter_number, one.parameter_number


def _instructions(module: Any, opcode: str) -> list[Any]:
    found = (each for each in hlo.entry(module).instructions if each.opcode == opcode)
    return [each for each in found if len(each.shape.dimensions) == 3]


def _unsummed(module: Any) -> None:
    """Every rank has its own part of the sums of the first tokens."""
    scatter = _instructions(module, "reduce-scatter")[1]
    scatter.opcode = "slice"
    for field in ("replica_groups", "called_computation_ids", "dimensions"):
        scatter.ClearField(field)
    for size in scatter.shape.dimensions:
        scatter.slice_dimensions.add(start=0, limit=size, stride=1)


@pytest.mark.parametrize(
    ("case", "split", "change"),
    [
        ("plain", None, _swap_memory),
        ("plain", None, lambda module: module.input_output_alias.entries.pop()),
        ("ranks", True, _unsummed),
    ],
    ids=["memory of another state", "old state", "sums"],
)
def test_a_changed_module_is_found(case: str, split: bool | None, change: Callable[[Any], None], cases: Cases) -> None:
    assert places(cases[case].compare(_changed(cases.sound(case, split), change)))


def test_ranks_that_split_tokens_hold(cases: Cases) -> None:
    modules = cases.sound("ranks", True)
    (step,) = (each for name, each in modules.items() if name not in SAMPLERS.values())
    module = hlo.parse(step.hlo)
    assert len(_instructions(module, "reduce-scatter")) == len(_instructions(module, "all-gather")) == 3
    assert not _instructions(module, "all-reduce")
    assert places(cases["ranks"].compare(modules)) == []


def test_a_dropped_collective_is_found(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, case = [], cases["ranks"]

    def dropped(original: Any, tracer: Any, target: Any, args: Any, kwargs: Any) -> Tensor:
        calls.extend([target] * (target in (collectives.ALL_REDUCE, collectives.ALL_GATHER)))
        return args[0] if len(calls) == 2 and target is calls[1] else original(tracer, target, args, kwargs)

    wrap(monkeypatch, xla_trace._Tracer, "call_function", dropped)
    modules = cases.lower("ranks")
    assert len(calls) > 2 and places(case.compare(modules))


@pytest.mark.parametrize(("case", "weight"), [("plain", "o_proj.weight"), ("ranks", "gate_proj-up_proj.weight")])
def test_a_transposed_weight_or_anothers_part_is_found(case: str, weight: str, cases: Cases, tmp_path: Path) -> None:
    sound, ranks = cases[case], CASES[case][0]
    modules = cases.sound(case)
    assert places(sound.compare(modules)) == []
    names = [rank_weights_name(rank, ranks) for rank in range(ranks)]
    files = [load_file(sound.setup.folder / name) for name in names]
    name = next(each for each in files[0] if weight in each)
    if ranks == 1:
        files[0][name] = files[0][name].T.contiguous()
    else:
        files[0][name], files[1][name] = files[1][name], files[0][name]
    (tmp_path / "weights").mkdir()
    for path, tensors in zip(names, files, strict=True):
        save_file(tensors, tmp_path / path)
    setup = dataclasses.replace(sound.setup, folder=tmp_path)
    assert places(dataclasses.replace(sound, setup=setup).compare(modules))
