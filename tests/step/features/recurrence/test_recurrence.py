# SPDX-License-Identifier: Apache-2.0
"""Recurrences over the tokens of a slot: no cut of a prompt, neighbor, slot or earlier owner changes a bit, and what is computed is right."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from optimum_neuron.config import NeuronConfig
from optimum_neuron.step.attention.kv_cache import KVCache, write_indices
from optimum_neuron.step.attention.rows import actual_tokens_mask
from optimum_neuron.step.features.recurrence import recurrent_functions
from optimum_neuron.step.features.recurrence.recurrence import ScanCall, ScanKind, ScanRows, ScanState, SlotScans
from optimum_neuron.step.features.recurrence.scan_grid import walk
from optimum_neuron.step.features.recurrence.state import RecurrentState
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.ops import DEFAULT_OPS
from optimum_neuron.step.state_specs import state_specs


SLOTS, HEADS, KEY, VALUE = 3, 4, 8, 6
SCANS: dict[str, ScanKind] = {
    "gated delta": "delta_rule",
    "by channel": "delta_rule",
    "linear": "state_space_scan",
    "selective": "selective_scan",
}
KINDS = tuple(SCANS)
# Tokens of a chunk row, rows of a step, and the block that follows: rows shorter than a block, longer, and several of them.
SHAPES = {"short rows": (3, 1, 8), "long rows": (20, 1, 8), "several rows": (5, 3, 4)}


def text(kind: str, tokens: int, seed: int = 0) -> ScanCall:
    draw = torch.Generator().manual_seed(seed)
    normal, uniform = (lambda *shape, fill=fill: fill(*shape, generator=draw) for fill in (torch.randn, torch.rand))
    query, key = (normal(tokens, HEADS // 2 if kind == "linear" else HEADS, KEY) for _ in "qk")
    query, key = (each / each.norm(dim=-1, keepdim=True) for each in (query, key))
    decay = -uniform(tokens, HEADS, KEY) if kind == "by channel" else -uniform(tokens, HEADS)
    beta = None if SCANS[kind] != "delta_rule" else uniform(tokens, HEADS)
    if kind == "selective":
        rates = -torch.rand(KEY, VALUE, generator=torch.Generator().manual_seed(1))
        step = uniform(tokens, 1, VALUE)
        return ScanCall(query[:, :1], key[:, :1], normal(tokens, 1, VALUE), step, rates=rates)
    return ScanCall(query, key, normal(tokens, HEADS, VALUE), decay, beta)


def rows_of(call: ScanCall, index: Tensor) -> ScanCall:
    beta = None if call.beta is None else call.beta[index]
    return ScanCall(call.query[index], call.key[index], call.value[index], call.decay[index], beta, call.rates)


@dataclass
class Steps:
    """Steps over slots, as step modules make them: decode rows, then chunk rows. Padding gets garbage."""

    kind: str
    tokens: int
    rows: int
    block: int

    def __post_init__(self) -> None:
        call = text(self.kind, 1)
        state = RecurrentState(0, 0, call.heads, call.key.shape[2], call.value.shape[2], call.width)
        spec = ModelSpec(9, (state,), num_embeddings=9)
        # The block follows from the chunk size of a config.
        config = NeuronConfig(
            batch_size=SLOTS, sequence_length=1024, prefill_chunk_size=self.block, dtype="float32", ctx_batch_size=1
        )
        self.cache = KVCache(state_specs(config, spec))
        self.scan: ScanKind = SCANS[self.kind]

    def step(self, chunks: list[tuple[int, int, ScanCall]], decodes: dict[int, tuple[int, ScanCall]]) -> Any:
        """Chunks of a slot, a first position and tokens, and a token per slot; returns the outputs of both."""
        garbage = [rows_of(text(self.kind, 1, seed=9), torch.zeros(1, dtype=torch.long))]
        garbage = [replace(each, key=each.key * torch.nan, value=each.value * torch.inf) for each in garbage]
        decode = torch.full((SLOTS, 1), -1, dtype=torch.int32)
        chunk = torch.full((self.rows, self.tokens), -1, dtype=torch.int32)
        slots = torch.zeros(self.rows, dtype=torch.int32)
        calls = [decodes[slot][1] if slot in decodes else garbage[0] for slot in range(SLOTS)]
        for slot, (position, _) in decodes.items():
            decode[slot] = position
        row, ends = 0, []
        for slot, position, call in chunks:
            done = 0
            while done < len(call.value):
                count = min(self.tokens, len(call.value) - done)
                place = torch.arange(position + done, position + done + self.tokens)
                chunk[row], slots[row] = place.clamp(max=position + done + count - 1), slot
                own = torch.arange(done, done + count)
                calls += [rows_of(call, own), *garbage * (self.tokens - count)]
                ends.append((slot, SLOTS + row * self.tokens, count))
                row, done = row + 1, done + count
        calls += garbage * ((self.rows - row) * self.tokens)
        outputs = self.run(joined(calls), decode, chunk, slots)
        found: dict[int, list[Tensor]] = {}
        for slot, start, count in ends:
            found.setdefault(slot, []).append(outputs[start : start + count])
        return {slot: torch.cat(parts) for slot, parts in found.items()}, {slot: outputs[slot] for slot in decodes}

    def run(self, call: ScanCall, decode: Tensor, chunk: Tensor, slots: Tensor) -> Tensor:
        own = torch.arange(SLOTS, dtype=torch.int32)
        writes = [
            write_indices(decode, actual_tokens_mask(decode), own, SLOTS, 0),
            write_indices(chunk, actual_tokens_mask(chunk), slots, SLOTS, SLOTS),
        ]
        indices = [torch.cat(each) for each in zip(*writes, strict=True)]
        self.last_rows = ScanRows(
            *indices, decode[:, 0], chunk, actual_tokens_mask(chunk), slots, self.cache.find_state("scanned")
        )
        scans = SlotScans(self.cache, self.last_rows, DEFAULT_OPS)
        scans.enter_layer(0)
        return scans.scan(self.scan, call)

    def prefill(self, slot: int, call: ScanCall, pieces: list[int], start: int = 0) -> Tensor:
        outputs, done = [], 0
        for piece in pieces:
            part = rows_of(call, torch.arange(done, done + piece))
            outputs.append(self.step([(slot, start + done, part)], {})[0][slot])
            done += piece
        return torch.cat(outputs)

    def states(self, slot: int) -> list[Tensor]:
        return [
            each[slot].clone()
            for role in RecurrentState.roles
            if (each := self.cache.find_state(role, 0, 0)) is not None
        ]


def joined(calls: list[ScanCall]) -> ScanCall:
    return ScanCall(
        *(torch.cat([getattr(call, name) for call in calls]) for name in ("query", "key", "value", "decay")),
        None if calls[0].beta is None else torch.cat([call.beta for call in calls if call.beta is not None]),
        calls[0].rates,
    )


def whole(total: int, most: int) -> list[int]:
    return [min(most, total - start) for start in range(0, total, most)]


def in_float64(call: ScanCall) -> Tensor:
    wide = ScanCall(*(None if each is None else each.double() for each in vars(call).values()))  # type: ignore[arg-type]
    state = torch.zeros(2, wide.heads, wide.key.shape[2], wide.value.shape[2], dtype=torch.float64)
    place = torch.arange(len(call.value), dtype=torch.int32)
    return walk(wide, ScanRows(torch.zeros_like(place), place, None, None, None, None), ScanState(state))


def kinds_and_shapes() -> list[Any]:
    """One kind in all shapes, and all kinds in one; the others by the full profile."""
    pairs = [(kind, shape) for kind in KINDS for shape in SHAPES]
    few = [kind == "gated delta" or shape == "several rows" for kind, shape in pairs]
    return [
        pytest.param(*pair, marks=[] if each else [pytest.mark.full]) for pair, each in zip(pairs, few, strict=True)
    ]


@pytest.mark.parametrize(("kind", "shape"), kinds_and_shapes())
def test_no_cut_neighbor_slot_or_earlier_owner_changes_a_bit(kind: str, shape: str) -> None:
    tokens, rows, block = SHAPES[shape]
    total, most = 26, tokens * rows
    call, another = text(kind, total), text(kind, 160, seed=5)
    steps = Steps(kind, tokens, rows, block)
    expected = steps.prefill(1, call, whole(total, most))
    kept = steps.states(1)
    assert float((expected - in_float64(call)).abs().max()) < 2e-6

    @examples(15)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        slot = data.draw(st.integers(0, SLOTS - 1))
        for state in steps.cache.buffers():
            state.fill_(torch.nan) if state.is_floating_point() else state.fill_(data.draw(st.integers(-1, 40)))
        done, others, outputs = 0, {each: 0 for each in range(SLOTS) if each != slot}, []
        while done < total:
            count = min(data.draw(st.integers(1, most)), total - done)
            chunks = [(slot, done, rows_of(call, torch.arange(done, done + count)))]
            free = rows - -(-count // tokens)
            decodes = {}
            for other, at in others.items():
                action = data.draw(st.sampled_from(["nothing", "decode", "chunk"]))
                if action == "chunk" and free > 0:
                    length = data.draw(st.integers(1, tokens))
                    chunks.append((other, at, rows_of(another, torch.arange(at, at + length))))
                    free, others[other] = free - 1, at + length
                elif action == "decode":
                    decodes[other] = (at, rows_of(another, torch.arange(at, at + 1)))
                    others[other] = at + 1
            outputs.append(steps.step(data.draw(st.permutations(chunks)), decodes)[0][slot])
            done += count
        other, at = others.popitem()
        steps.step(
            [], {other: (at, rows_of(another, torch.arange(at, at + 1)))}
        )  # a slot without a token keeps its state
        assert torch.equal(torch.cat(outputs), expected)
        assert all(map(torch.equal, steps.states(slot), kept))

    check()


@pytest.mark.parametrize(("kind", "shape"), kinds_and_shapes())
def test_decoded_tokens_and_chunks_behind_them_are_right(kind: str, shape: str) -> None:
    tokens, rows, block = SHAPES[shape]
    call = text(kind, 41)
    expected = in_float64(call)
    steps = Steps(kind, tokens, rows, block)
    steps.prefill(1, text(kind, 12, seed=3), [2] * 6)  # the slot's last owner ends where a chunk of the next begins
    found = [steps.step([], {1: (at, rows_of(call, torch.arange(at, at + 1)))})[1][1][None] for at in range(12)]
    found.append(steps.prefill(1, rows_of(call, torch.arange(12, 27)), [3] * 5, start=12))
    found += [steps.step([], {1: (at, rows_of(call, torch.arange(at, at + 1)))})[1][1][None] for at in range(27, 30)]
    found.append(steps.prefill(1, rows_of(call, torch.arange(30, 41)), [1, 3, 3, 3, 1], start=30))
    assert float((torch.cat(found) - expected).abs().max()) < 2e-6


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_three_hundred_times_is_close_to_float64(kind: str) -> None:
    """Where keys are equal, powers of a block's matrix overflow and cancel; its inverse has no large entry."""
    one = text(kind, 1)
    beta = None if one.beta is None else torch.full_like(one.beta, 0.9)
    decay = one.decay * (0.0 if one.beta is not None else 0.1)
    call = rows_of(ScanCall(one.query, one.key, one.value, decay, beta, one.rates), torch.zeros(300, dtype=torch.long))
    steps = Steps(kind, 96, 1, 64)
    found, expected = steps.prefill(0, call, [96, 96, 96, 12]), in_float64(call)
    scale = max(float(one.value.abs().max()), float(expected.abs().max()))
    assert float((found - expected).abs().max()) < 1e-6 * scale


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_token_is_seen_by_those_behind_it_in_its_slot_alone(kind: str) -> None:
    call, another = text(kind, 30), text(kind, 30, seed=1)
    steps = Steps(kind, 10, 2, 4)
    expected = steps.prefill(0, call, [10, 10, 10])
    beside = steps.prefill(1, another, [10, 10, 10])
    for name in ("key", "value", "decay"):
        broken = replace(call, **{name: getattr(call, name).clone()})
        getattr(broken, name)[13, 0] = torch.nan if name == "decay" else torch.inf
        found, others = [], []
        for start in (0, 10, 20):
            place = torch.arange(start, start + 10)
            outputs, _ = steps.step([(0, start, rows_of(broken, place)), (1, start, rows_of(another, place))], {})
            found.append(outputs[0])
            others.append(outputs[1])
        assert torch.equal(torch.cat(found)[:13], expected[:13]) and torch.equal(torch.cat(others), beside)
        assert torch.cat(found)[13:].isnan().all()
        _, decoded = steps.step(
            [], {0: (30, rows_of(call, torch.tensor([0]))), 1: (30, rows_of(call, torch.tensor([0])))}
        )
        assert decoded[0].isnan().all() and decoded[1].isfinite().all()
    assert torch.equal(steps.prefill(0, call, [10, 10, 10]), expected)  # the next request in its slot


@pytest.mark.parametrize("kind", KINDS)
def test_a_walk_over_the_same_steps_computes_the_same(kind: str) -> None:
    """What a target with a kernel for it does: it keeps the current state alone."""
    call = text(kind, 37)
    grid, walking = Steps(kind, 5, 3, 4), Steps(kind, 5, 3, 4)
    for name in ("anchor_0_0", "tail_0_0"):
        delattr(walking.cache, name)
    found, expected = (steps.prefill(2, call, [7, 15, 1, 14]) for steps in (walking, grid))
    assert float((found - expected).abs().max()) < 2e-6
    assert float((walking.states(2)[0] - grid.states(2)[0]).abs().max()) < 2e-6
    pieces = Steps(kind, 5, 3, 4)
    for name in ("anchor_0_0", "tail_0_0"):
        delattr(pieces.cache, name)
    assert torch.equal(pieces.prefill(2, call, [1] * 37), found)


class _Noted:
    """A step that keeps the call of its scan."""

    def scan(self, kind: str, call: ScanCall) -> Tensor:
        self.call = call
        return torch.zeros_like(call.value)


def test_limits_of_a_time_step_are_not_rounded_to_the_type_of_the_model() -> None:
    limits, noted = (0.001, 0.1), _Noted()
    assert all(float(torch.tensor(each, dtype=torch.bfloat16)) != each for each in limits)
    steps = torch.tensor([-20.0, 20.0], dtype=torch.bfloat16).view(1, 2, 1)
    one = torch.ones(1, 2, 1, 4, dtype=torch.bfloat16)
    scan: Any = recurrent_functions._OURS["mamba2_chunk_scan"]
    scan(noted, one, steps, -torch.ones(1), one, one, dt_softplus=True, dt_limit=limits)
    expected = torch.tensor(limits)
    assert torch.equal(-noted.call.decay.flatten(), expected)
    assert torch.equal(noted.call.value[:, 0], expected[:, None].expand(2, 4))
