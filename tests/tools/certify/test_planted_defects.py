# SPDX-License-Identifier: Apache-2.0
"""Mistakes of a lowering, planted one at a time: the certificate's comparison finds each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
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
from optimum_neuron.step.attention.rows import AttentionRows
from optimum_neuron.step.sampling.buffers import ChosenTokens, Scores
from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.graphs.io import COPY_SLOT, SAMPLERS
from optimum_neuron.targets.neuron.lowering import decompositions, xla_trace
from optimum_neuron.targets.neuron.lowering import graph_modules as score_module
from optimum_neuron.targets.neuron.lowering import lower_all as rank_model
from optimum_neuron.targets.neuron.lowering.graph_modules import SlotCopy
from optimum_neuron.targets.neuron.operators import collectives
from optimum_neuron.tools.certify.host_ranks import LoweredModule


Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("one"), 1, "mixed")


@pytest.fixture(scope="module")
def sound(one_rank: Case) -> dict[str, LoweredModule]:
    return one_rank.lower("mixed")


def _ops(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
    monkeypatch.setattr(rank_model, "NEURON_OPS", dataclasses.replace(rank_model.NEURON_OPS, **changed))


def _mask_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    def visible(original: Any, rows: AttentionRows, window: Any, start: int = 0, stop: int | None = None) -> Tensor:
        columns = torch.arange(start, rows.context_length if stop is None else stop, dtype=torch.int32)
        return original(rows, window, start, stop) & (columns != rows.position_ids[:, :, None])

    wrap(monkeypatch, AttentionRows, "visible", visible)


def _window_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    wrap(
        monkeypatch,
        AttentionRows,
        "visible",
        lambda original, rows, window, *columns: original(rows, window and window + 1, *columns),
    )


def _position_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    wrap(
        monkeypatch,
        Qwen2RotaryEmbedding,
        "forward",
        lambda original, module, x, position_ids: original(module, x, position_ids + 1),
    )


def _stale_state(monkeypatch: pytest.MonkeyPatch) -> None:
    write = rank_model.NEURON_OPS.write_cache
    _ops(monkeypatch, write_cache=lambda cache, states, rows, columns: write(cache, states[:3], rows[:3], columns[:3]))


def _wrong_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    def indices(original: Any, positions: Tensor, actual: Tensor, slots: Tensor, trash: int, offset: int) -> Any:
        return original(positions, actual, slots if offset == 0 else 2 - slots, trash, offset)

    wrap(monkeypatch, step_module, "write_indices", indices)


def _dtype_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    wrap(monkeypatch, torch, "exp", lambda original, x: original(x).bfloat16().float())


def _wrong_output_row(monkeypatch: pytest.MonkeyPatch) -> None:
    _ops(monkeypatch, output_rows=lambda rows: (rows - 1).clamp(min=0))


def _sampler_without_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(original: Any, logits: Tensor, params: Tensor, *others: Any) -> Tensor:
        return original(logits, params * torch.tensor([1.0, 1.0, 0.0, 1.0]), *others)

    wrap(monkeypatch, score_module, "sample", greedy)


def _scores_of_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(original: Any, self: Scores, group: str, logits: Tensor, active: Tensor) -> None:
        original(self, group, logits.flip(0), active)

    wrap(monkeypatch, Scores, "keep_logits", keep)


def _token_of_another_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(original: Any, self: ChosenTokens, input_ids: Tensor) -> Tensor:
        return torch.where(input_ids < 0, self.tokens.flip(0)[:, None], input_ids)

    wrap(monkeypatch, ChosenTokens, "fill_ids", fill)


def _first_row_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(original: Any, self: ChosenTokens, tokens: Tensor, slots: Tensor) -> None:
        original(self, tokens.flip(0), slots.flip(0))

    wrap(monkeypatch, ChosenTokens, "keep_tokens", keep)


def _idle_row_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    def slots_of_rows(original: Any, position_ids: Tensor, seq_ids: Tensor | None) -> Tensor:
        return original(position_ids.clamp(min=0), seq_ids)

    wrap(monkeypatch, step_module, "slots_of_rows", slots_of_rows)


def _sampler_keeps_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_module, "ChosenTokens", _Unchanged)


class _Unchanged(ChosenTokens):
    def keep_tokens(self, tokens: Tensor, slots: Tensor) -> None:
        self.tokens.copy_(self.tokens + 0 * slots.amax() + 0 * tokens.amax())


def _wrong_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    wrap(
        monkeypatch,
        decompositions,
        "_mean_by_sum",
        lambda original, *args, **kwargs: original(*args, **kwargs) * 1.0001,
    )


PLANTED: tuple[Plant, ...] = (
    _mask_edge, _window_edge, _position_off_by_one, _wrong_norm, _stale_state, _wrong_slot, _dtype_cut, _wrong_output_row,
    _sampler_without_temperature, _scores_of_another_row, _token_of_another_slot, _first_row_of_a_prompt, _idle_row_keeps,
    _sampler_keeps_the_largest,
)  # fmt: skip
# One of attention, of states, of a type, of a sampler and of tokens left for later; the others by the full profile.
QUICK = (_mask_edge, _stale_state, _dtype_cut, _sampler_without_temperature, _token_of_another_slot)


def test_a_sound_lowering_holds(one_rank: Case, sound: dict[str, LoweredModule]) -> None:
    comparisons = one_rank.compare(sound)
    assert places(comparisons) == []
    assert {each.subject.split(": ")[-1] for each in comparisons} == {
        "decode.logits", "chunk.logits", "key", "value", "decode.tokens", "chunk.tokens",
        "decode.drawn", "chunk.drawn", "chosen.tokens", "chosen.drawn",
    }  # fmt: skip
    # Far from the bound, so that it is no matter of luck.
    assert all(each.difference <= each.bound / 3 for each in comparisons)


@pytest.mark.parametrize(
    "plant", [pytest.param(each, marks=[] if each in QUICK else [pytest.mark.full]) for each in PLANTED]
)
def test_a_planted_defect_is_found(plant: Plant, one_rank: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert places(one_rank.compare(one_rank.lower("mixed")))


def _changed(modules: Mapping[str, LoweredModule], change: Callable[[Any], None]) -> dict[str, LoweredModule]:
    """Steps that are changed, and samplers as they are."""
    changed = dict(modules)
    for name, each in modules.items():
        if name in SAMPLERS.values():
            continue
        module = hlo.parse(each.hlo)
        change(module)
        changed[name] = LoweredModule(hlo.serialize(module), each.io)
    return changed


def _with_weights(case: Case, files: list[dict[str, Tensor]], names: list[str], folder: Path) -> Case:
    """The same with other weights."""
    (folder / "weights").mkdir(parents=True)
    for name, tensors in zip(names, files, strict=True):
        save_file(tensors, folder / name)
    return dataclasses.replace(case, setup=dataclasses.replace(case.setup, folder=folder))


def test_a_transposed_weight_is_found(one_rank: Case, sound: dict[str, LoweredModule], tmp_path: Path) -> None:
    tensors = load_file(one_rank.setup.folder / rank_weights_name(0, 1))
    name = next(each for each in tensors if "o_proj.weight" in each)
    tensors[name] = tensors[name].T.contiguous()
    assert places(_with_weights(one_rank, [tensors], [rank_weights_name(0, 1)], tmp_path).compare(sound))


def _swap_memory(module: Any) -> None:
    one, other = module.input_output_alias.entries[:2]
    one.parameter_number, other.parameter_number = other.parameter_number, one.parameter_number


def _keep_old_state(module: Any) -> None:
    module.input_output_alias.entries.pop()


@pytest.mark.parametrize("change", [_swap_memory, _keep_old_state])
def test_a_state_in_wrong_memory_is_found(
    change: Callable[[Any], None], one_rank: Case, sound: dict[str, LoweredModule]
) -> None:
    assert places(one_rank.compare(_changed(sound, change)))


def test_a_copy_of_one_column_too_many_is_found(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(tmp_path_factory.mktemp("copy"), 1, "mixed", COPY_SLOT)
    assert places(case.compare(case.lower("mixed", COPY_SLOT))) == []
    forward = SlotCopy.forward
    monkeypatch.setattr(
        SlotCopy, "forward", lambda self, source, destination, length: forward(self, source, destination, length + 1)
    )
    assert places(case.compare(case.lower("mixed", COPY_SLOT)))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("two"), 2, "mixed", batch_size=4)  # and an even number of tokens


@pytest.fixture(scope="module")
def sound_ranks(two_ranks: Case) -> dict[str, LoweredModule]:
    modules = two_ranks.lower("mixed")
    assert places(two_ranks.compare(modules)) == []
    return modules


def test_a_dropped_collective_is_found(two_ranks: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def dropped(original: Any, tracer: Any, target: Any, args: Any, kwargs: Any) -> Tensor:
        calls.extend([target] * (target in (collectives.ALL_REDUCE, collectives.ALL_GATHER)))
        return args[0] if len(calls) == 2 and target is calls[1] else original(tracer, target, args, kwargs)

    wrap(monkeypatch, xla_trace._Tracer, "call_function", dropped)
    modules = two_ranks.lower("mixed")
    assert len(calls) > 2 and places(two_ranks.compare(modules))


@pytest.fixture(scope="module")
def split_ranks(two_ranks: Case) -> dict[str, LoweredModule]:
    return two_ranks.lower("mixed", split=True)


def _instructions(module: Any, opcode: str) -> list[Any]:
    return [
        each for each in hlo.entry(module).instructions if each.opcode == opcode and len(each.shape.dimensions) == 3
    ]


def test_ranks_that_split_tokens_hold(two_ranks: Case, split_ranks: dict[str, LoweredModule]) -> None:
    (step,) = (each for name, each in split_ranks.items() if name not in SAMPLERS.values())
    module = hlo.parse(step.hlo)
    assert len(_instructions(module, "reduce-scatter")) == len(_instructions(module, "all-gather")) == 3
    assert not _instructions(module, "all-reduce")
    assert places(two_ranks.compare(split_ranks)) == []


def _ungathered(module: Any) -> None:
    """Every rank takes its own tokens for those of the others."""
    gather = _instructions(module, "all-gather")[1]
    gather.opcode = "concatenate"
    gather.operand_ids.append(gather.operand_ids[0])
    gather.ClearField("replica_groups")


def _unsummed(module: Any) -> None:
    """Every rank has its own part of the sums of the first tokens."""
    scatter = _instructions(module, "reduce-scatter")[1]
    scatter.opcode = "slice"
    for field in ("replica_groups", "called_computation_ids", "dimensions"):
        scatter.ClearField(field)
    for size in scatter.shape.dimensions:
        scatter.slice_dimensions.add(start=0, limit=size, stride=1)


@pytest.mark.parametrize("change", [_unsummed, pytest.param(_ungathered, marks=pytest.mark.full)])
def test_a_wrong_exchange_of_split_tokens_is_found(
    change: Callable[[Any], None], two_ranks: Case, split_ranks: dict[str, LoweredModule]
) -> None:
    assert places(two_ranks.compare(_changed(split_ranks, change)))


@pytest.mark.parametrize(
    "weight",
    [
        "gate_proj-up_proj.weight",
        *(pytest.param(each, marks=pytest.mark.full) for each in ("o_proj.weight", "tensor_parallel_rank")),
    ],
)
def test_a_wrong_split_is_found(
    weight: str, two_ranks: Case, sound_ranks: dict[str, LoweredModule], tmp_path: Path
) -> None:
    """Two ranks have each other's part of one tensor."""
    names = [rank_weights_name(rank, 2) for rank in range(2)]
    files = [load_file(two_ranks.setup.folder / name) for name in names]
    name = next(each for each in files[0] if weight in each)
    files[0][name], files[1][name] = files[1][name], files[0][name]
    assert places(_with_weights(two_ranks, files, names, tmp_path).compare(sound_ranks))
