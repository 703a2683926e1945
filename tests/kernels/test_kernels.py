# SPDX-License-Identifier: Apache-2.0
"""The own kernels of every instruction set against float64, and equal to the bit where they must be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import (
    DTYPES,
    ROUNDING,
    Kernels,
    RefusedError,
    Tensors,
    check_guards,
    guarded,
    int32,
    random,
    same_bits,
    with_dtypes,
)
from torch import Tensor
from torch.nn.functional import linear

from optimum_neuron.kernels.steps.access import PlanError
from optimum_neuron.kernels.steps.steps import Layer, Linears
from optimum_neuron.step.attention.cached_attention import attend_cache
from optimum_neuron.step.attention.call import AttentionCall
from optimum_neuron.step.attention.masks import AttentionChunk
from optimum_neuron.step.attention.rows import AttentionRows
from optimum_neuron.targets.cpu import ops


pytestmark = pytest.mark.usefixtures("torch_with_one_thread")
NAN, INFINITY = float("nan"), float("inf")


def all_same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(same_bits(a, b) for a, b in zip(left, right, strict=True))


# No multiples of a vector, of a chunk of columns, of a panel or of a tile; one layer and several.
LINEARS = [(1, [1]), (31, [5, 3]), (33, [4]), (100, [37]), (576, [192, 64, 64]), (2050, [130, 7])]
# Of one tile, of one block and of several, each with tiles of even and uneven heights.
ROWS = (1, 2, 3, 5, 6, 7, 13, 24, 25, 32, 72, 145)


class TestLinears:
    @pytest.fixture
    def kernels(self, product_kernels: Kernels) -> Kernels:
        return product_kernels

    @with_dtypes
    @pytest.mark.parametrize(("columns", "outputs"), LINEARS)
    def test_linears_match_float64(
        self, kernels: Kernels, dtype: torch.dtype, columns: int, outputs: list[int]
    ) -> None:
        weights = [random(size, columns, dtype=dtype) for size in outputs]
        biases = [random(size, dtype=dtype) if index % 2 == 0 else None for index, size in enumerate(outputs)]
        x = random(max(ROWS), columns, dtype=dtype)
        exact, terms = [], []
        for weight, bias in zip(weights, biases, strict=True):
            exact.append(linear(x.double(), weight.double(), None if bias is None else bias.double()))
            terms.append(linear(x.double().abs(), weight.double().abs()) + 1)
        for rows in ROWS:
            results = kernels.linears(x[:rows], weights, biases)
            for result, wanted, sizes in zip(results, exact, terms, strict=True):
                assert result.dtype == dtype and result.shape == wanted[:rows].shape
                error = (result.double() - wanted[:rows]).abs()
                assert (error <= sizes[:rows] * 2**-21 + wanted[:rows].abs() * ROUNDING[dtype] * 1.001).all()

    @with_dtypes
    @pytest.mark.parametrize(("columns", "outputs"), [(33, [5, 3]), (2050, [130, 7]), (1000, [1501, 1003])])
    def test_a_row_of_linears_depends_on_nothing_else(
        self, kernels: Kernels, dtype: torch.dtype, columns: int, outputs: list[int]
    ) -> None:
        weights = [random(size, columns, dtype=dtype) for size in outputs]
        biases = [random(outputs[0], dtype=dtype), None]
        x = random(300, columns, dtype=dtype)
        whole = kernels.linears(x, weights, biases)
        for rows in range(1, 300) if columns < 100 else (*range(1, 50, 6), *ROWS, 299):
            assert all_same(kernels.linears(x[:rows], weights, biases), [result[:rows] for result in whole])
        order = torch.randperm(300)
        assert all_same(kernels.linears(x[order], weights, biases), [result[order] for result in whole])
        for index in range(2):
            assert same_bits(
                kernels.linears(x, weights[index : index + 1], biases[index : index + 1])[0], whole[index]
            )
        for value in (NAN, INFINITY):
            poisoned, bad = x.clone(), weights[0].clone()
            poisoned[3, -1], bad[1, -1] = value, value
            for result, clean in zip(kernels.linears(poisoned, weights, biases), whole, strict=True):
                assert not result[3].isfinite().any()
                assert same_bits(result[4:], clean[4:]) and same_bits(result[:3], clean[:3])
            (result,) = kernels.linears(x, [bad], biases[:1])
            assert not result[:, 1].isfinite().any()
            assert same_bits(result[:, 2:], whole[0][:, 2:]) and same_bits(result[:, :1], whole[0][:, :1])

    @examples(60)
    @given(st.sampled_from(DTYPES), st.data())
    def test_neither_sizes_nor_threads_change_a_row_of_linears(
        self, product_kernels: Kernels, dtype: torch.dtype, data: st.DataObject
    ) -> None:
        columns = data.draw(st.one_of(st.integers(1, 200), st.integers(1, 3000)), "columns")
        outputs = data.draw(st.integers(1, 150), "outputs")
        rows = data.draw(st.integers(1, 300), "rows")
        first = data.draw(st.integers(0, rows - 1), "first")
        stop = data.draw(st.integers(first + 1, rows), "stop")
        begin = data.draw(st.integers(0, outputs - 1), "begin")
        x, weight, bias = (random(*sizes, dtype=dtype) for sizes in ((rows, columns), (outputs, columns), (outputs,)))
        (whole,) = product_kernels.linears(x, [weight], [bias])
        with product_kernels.with_threads(data.draw(st.integers(1, 3), "threads")):
            (part,) = product_kernels.linears(x[first:stop], [weight[begin:]], [bias[begin:]])
        assert same_bits(part, whole[first:stop, begin:])

    @pytest.mark.parametrize("beside", [1.0, 0.0])
    def test_every_number_of_float16_is_what_it_is(self, kernels: Kernels, beside: float) -> None:
        numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
        for place in range(4):
            x, weight = torch.zeros(1, 32).half(), torch.full((len(numbers), 32), beside).half()
            x[0, place], weight[:, place] = 1, numbers
            torch.testing.assert_close(
                kernels.linears(x, [weight], [None])[0][0], numbers, rtol=0, atol=0, equal_nan=True
            )

    @with_dtypes
    def test_the_number_of_threads_changes_no_bit_of_linears(self, kernels: Kernels, dtype: torch.dtype) -> None:
        weights = [random(size, 512, dtype=dtype) for size in (1500, 300)]
        x = random(70, 512, dtype=dtype)
        for rows in (1, 70):
            results = []
            for count in (1, 2, 3):
                with kernels.with_threads(count):
                    results.append(kernels.linears(x[:rows], weights, [None, None]))
            assert all_same(results[0], results[1]) and all_same(results[0], results[2])

    @with_dtypes
    def test_rows_of_linears_may_lie_apart_before_and_after(self, kernels: Kernels, dtype: torch.dtype) -> None:
        wide, weight = random(9, 200, dtype=dtype), random(40, 64, dtype=dtype)
        (expected,) = kernels.linears(wide[:, 70:134].contiguous(), [weight], [None])
        assert same_bits(kernels.linears(wide[:, 70:134], [weight], [None])[0], expected)
        assert same_bits(kernels.linears(wide[::2, 70:134], [weight], [None])[0], expected[::2])
        assert same_bits(
            kernels.linears(wide[2, 70:134].expand(5, 64), [weight], [None])[0], expected[2].expand(5, 40)
        )
        both = guarded((9, 100), dtype)
        both.fill_(7)
        tensors = Tensors()
        layers = (Layer(tensors(weight), None, tensors(both[:, 10:50])),)
        kernels.run(Linears(tensors(wide[:, 70:134]), layers), tensors)
        check_guards(both)
        assert same_bits(both[:, 10:50], expected)
        assert (both[:, :10] == 7).all() and (both[:, 50:] == 7).all()

    def test_linears_of_another_form_are_refused(self, best_kernels: Kernels) -> None:
        x, weight, bias = (random(*sizes, dtype=torch.float32) for sizes in ((3, 64), (40, 64), (40,)))
        refused: list[tuple[Tensor, Tensor, Tensor | None]] = [
            (x[:0], weight, None),
            (x[0], weight, None),
            (x.double(), weight.double(), None),
            (x.T.contiguous().T, weight, None),
            (x, weight.bfloat16(), None),
            (x, weight.T.contiguous().T, None),
            (x, weight[:, :60], None),
            (x, weight, bias[:39]),
            (x, weight, bias.half()),
        ]
        for rows, parameters, own_bias in refused:
            with pytest.raises(PlanError):
                best_kernels.linears(rows, [parameters], [own_bias])


def attend_exactly(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor | None,
    positions: Tensor,
    scaling: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    column_bias: Tensor | None = None,
) -> Tensor:
    """The contract in float64, as transformers has it; what is not finite in the cache must not be seen."""
    rows, heads, tokens = query.shape[:3]
    chosen = torch.arange(rows) if slots is None else slots
    key, value = (
        cache[chosen].double().nan_to_num(0, 0, 0).repeat_interleave(heads // keys.shape[1], 1)
        for cache in (keys, values)
    )
    columns, last = torch.arange(keys.shape[2]), positions[:, :, None]
    visible = (columns <= last) & (columns > last - (window or columns.numel() + 1))
    scores = query.double() @ key.transpose(2, 3) * scaling
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    if column_bias is not None:
        bias = column_bias.double()
        own = bias[:, positions.clamp(min=0)].transpose(0, 1)
        scores = scores + bias[:, None, : columns.numel()] - own[..., None]
    scores = scores.masked_fill(~visible[:, None], -1e300)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(rows, heads, tokens, 1)], -1)
    weights = scores.softmax(-1)[..., : columns.numel()]
    return ((weights @ value) * visible.any(2)[:, None, :, None]).transpose(1, 2)


def make_cache(
    slots: int, kv_heads: int, columns: int, dim: int, seen: dict[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values with NaN and infinity in every column that `seen` (slot to last position) does not cover."""
    keys, values = (random(slots, kv_heads, columns, dim, dtype=dtype) for _ in range(2))
    for slot in range(slots):
        keys[slot, :, seen.get(slot, -1) + 1 :] = NAN
        values[slot, :, seen.get(slot, -1) + 1 :] = NAN if slot % 2 else INFINITY
    return keys, values


# heads, kv heads, dim, columns, window
Shape = tuple[int, int, int, int, int]
SHAPES = [(4, 4, 16, 64, 0), (9, 3, 64, 200, 0), (4, 2, 48, 130, 7), (8, 1, 128, 333, 65), (6, 3, 256, 65, 100)]
# More columns than a section has, which threads share out: of all, and of a window over more than one.
SHAPES += [(6, 2, 32, 3100, 0), (6, 2, 32, 3100, 1500)]
with_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
# Probabilities are rounded to bfloat16 where the CPU multiplies it.
ATTEND_ERROR = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 5e-6}


class TestAttend:
    @pytest.fixture
    def kernels(self, product_kernels: Kernels) -> Kernels:
        return product_kernels

    @with_dtypes
    @with_shapes
    @pytest.mark.parametrize(("tokens", "by_slot"), [(1, True), (37, False)])
    def test_attend_matches_float64(
        self, kernels: Kernels, dtype: torch.dtype, shape: Shape, tokens: int, by_slot: bool
    ) -> None:
        (heads, kv_heads, dim, columns, window), rows, slots = shape, 3, 5
        seq_ids = int32([4, 0, 2]) if by_slot else None
        positions = torch.randint(-1, columns, (rows, tokens), dtype=torch.int32)
        positions[1, 0] = -1
        positions[2, 0] = columns - 1
        if tokens > 9 and columns > 3072:  # at both sides of where sections meet, and of where a window leaves one
            edges = (1023, 1024, 1722, 1723, 2047, 2048, 2523, 2524, 3071, 3072)
            positions[2, 1 : 1 + len(edges)] = int32(edges)
        seen = {
            int(slot): int(positions[row].max()) for row, slot in enumerate([0, 1, 2] if seq_ids is None else seq_ids)
        }
        keys, values = make_cache(slots, kv_heads, columns, dim, seen, dtype)
        query = random(rows, tokens, heads, dim, dtype=dtype).transpose(1, 2)
        inputs = (query, keys, values, seq_ids, positions, dim**-0.5, window)
        result = kernels.attend(*inputs)
        assert result.dtype == dtype and result.shape == (rows, tokens, heads, dim)
        assert not result[positions < 0].any()
        assert (result.double() - attend_exactly(*inputs)).abs().max() < ATTEND_ERROR[dtype]
        assert same_bits(kernels.attend(query.contiguous(), *inputs[1:]), result)

    @with_dtypes
    @pytest.mark.parametrize(("softcap", "has_sinks"), [(0.7, False), (30.0, False), (0.0, True), (5.0, True)])
    def test_softcap_and_sinks_are_those_of_transformers(
        self, kernels: Kernels, dtype: torch.dtype, softcap: float, has_sinks: bool
    ) -> None:
        sinks = torch.tensor([0.0, -3.0, 2.5, 40.0, -100.0, 9.0]) if has_sinks else None
        positions = torch.randint(-1, 150, (2, 19), dtype=torch.int32)
        positions[:, 3] = -1
        positions[:, 4] = 0
        keys, values = make_cache(2, 3, 150, 32, {row: int(positions[row].max()) for row in range(2)}, dtype)
        query = random(2, 6, 19, 32, dtype=dtype) * 3  # capped scores differ from others
        for window in (0, 20):
            inputs = (query, keys, values, None, positions, 0.3, window, softcap, sinks)
            result = kernels.attend(*inputs)
            assert not result[positions < 0].any()
            assert (result.double() - attend_exactly(*inputs)).abs().max() < 2 * ATTEND_ERROR[dtype]

    @with_dtypes
    def test_scores_of_any_size_and_sinks_without_weight_are_taken(self, kernels: Kernels, dtype: torch.dtype) -> None:
        keys, values = random(1, 1, 100, 16, dtype=dtype), random(1, 1, 100, 16, dtype=dtype)
        query, positions = random(1, 2, 1, 16, dtype=dtype), int32([[99]])
        for scaling in (0.0, 1e-3, 300.0, -300.0):
            inputs = (query, keys, values, None, positions, scaling)
            error = (kernels.attend(*inputs).double() - attend_exactly(*inputs)).abs().max()
            assert error < ATTEND_ERROR[dtype] * max(1, abs(scaling)), scaling
        inputs = (query, keys, values, None, positions, 0.25)
        plain = kernels.attend(*inputs)
        nothing = kernels.attend(*inputs, sinks=torch.tensor([-INFINITY, -1e30]))
        assert (nothing.double() - plain.double()).abs().max() <= ATTEND_ERROR[dtype]

    @with_dtypes
    def test_head_dimensions_are_multiples_of_16_up_to_256(self, kernels: Kernels, dtype: torch.dtype) -> None:
        for dim in range(16, 257, 16):
            keys, values = make_cache(2, 1, 70, dim, {0: 69, 1: 65}, dtype)
            query = random(2, 3, 2, dim, dtype=dtype)
            inputs = (query, keys, values, None, int32([[3, 69], [65, 40]]), dim**-0.5)
            error = (kernels.attend(*inputs).double() - attend_exactly(*inputs)).abs().max()
            assert error < ATTEND_ERROR[dtype], dim

    @with_dtypes
    @with_shapes
    @pytest.mark.parametrize("extras", [False, True])
    def test_a_token_of_attend_depends_on_nothing_else(
        self, kernels: Kernels, dtype: torch.dtype, shape: Shape, extras: bool
    ) -> None:
        heads, kv_heads, dim, columns, window = shape
        tokens = min(columns, 100) - 3
        options = (dim**-0.5, window, 3.0 if extras else 0.0, torch.randn(heads) if extras else None)
        positions = torch.arange(columns - tokens, columns, dtype=torch.int32)[None]
        keys, values = make_cache(3, kv_heads, columns, dim, {1: columns - 1}, dtype)
        query = random(1, tokens, heads, dim, dtype=dtype).transpose(1, 2)
        slot = int32([1])
        whole = kernels.attend(query, keys, values, slot, positions, *options)
        for size in (1, 7, 33):
            pieces = [
                kernels.attend(part, keys, values, slot, where.contiguous(), *options)
                for part, where in zip(query.split(size, 2), positions.split(size, 1), strict=True)
            ]
            assert same_bits(torch.cat(pieces, 1), whole)
        # As rows of one token, as in decoding, with an idle row among them.
        alone, idle = query.permute(2, 1, 0, 3), torch.where(torch.arange(tokens) == 5, -1, positions[0])[:, None]
        slots = slot.expand(tokens).contiguous()
        decoded = kernels.attend(alone, keys, values, slots, idle.int(), *options)
        assert not decoded[5].any()
        decoded[5] = whole[0, 5]
        assert same_bits(decoded[:, 0], whole[0])
        # The same columns in a smaller cache, after which and before whose window there is poison.
        stop = columns // 2 + 1
        first = max(0, stop - window) if window else 0
        for poison in (NAN, INFINITY, -INFINITY):
            small_keys, small_values = (
                torch.full((1, kv_heads, stop + 9, dim), poison, dtype=dtype) for _ in range(2)
            )
            small_keys[0, :, first:stop], small_values[0, :, first:stop] = (
                keys[1, :, first:stop],
                values[1, :, first:stop],
            )
            among = torch.randint(-1, stop + 9, (1, 5), dtype=torch.int32)
            among[0, 3] = stop - 1
            results = kernels.attend(query[:, :, :5], small_keys, small_values, None, among, *options)
            same = kernels.attend(query[:, :, 3:4], keys, values, slot, int32([[stop - 1]]), *options)
            assert same_bits(results[0, 3], same[0, 0]) and same.isfinite().all()

    @with_dtypes
    def test_the_number_of_threads_changes_no_bit_of_attend(self, kernels: Kernels, dtype: torch.dtype) -> None:
        for columns, (rows, tokens) in product((400, 3100), ((4, 1), (2, 96))):
            keys, values = random(4, 2, columns, 64, dtype=dtype), random(4, 2, columns, 64, dtype=dtype)
            query = random(rows, 6, tokens, 64, dtype=dtype)
            positions = torch.randint(200, columns, (rows, tokens), dtype=torch.int32)
            results = []
            for count in (1, 2, 3, 5):
                with kernels.with_threads(count):
                    results.append(kernels.attend(query, keys, values, None, positions, 0.125, sinks=torch.ones(6)))
            assert all(same_bits(each, results[0]) for each in results[1:])

    @with_dtypes
    def test_attend_shows_what_a_token_sees(self, kernels: Kernels, dtype: torch.dtype) -> None:
        query, window = random(1, 2, 1, 16, dtype=dtype), 1500
        for last, columns in ((69, (0, 63, 69)), (3099, (1024, 1599, 1600, 2500, 3099))):
            keys = random(2, 1, last + 1, 16, dtype=dtype)
            clean = kernels.attend(query, keys, keys, int32([1]), int32([[last]]), 0.25, window)
            for column in columns:
                poisoned = keys.clone()
                poisoned[1, :, column] = NAN
                for pair in ((poisoned, keys), (keys, poisoned)):
                    found = kernels.attend(query, *pair, int32([1]), int32([[last]]), 0.25, window)
                    assert found.isnan().all() if column > last - window else same_bits(found, clean)
                    assert kernels.attend(query, *pair, int32([0]), int32([[last]]), 0.25).isfinite().all()

    def test_slots_and_positions_that_are_not_there_are_refused(self, kernels: Kernels) -> None:
        query, keys = random(2, 2, 1, 16, dtype=torch.float32), random(2, 1, 70, 16, dtype=torch.float32)
        for slot, position in ((2, 0), (-1, 0), (0, 70), (0, -2), (0, 2**31 - 1), (-(2**31), 5)):
            output = guarded((2, 1, 2, 16), torch.float32)
            output.fill_(7)
            with pytest.raises(RefusedError):
                kernels.attend(query, keys, keys, int32([1, slot]), int32([[3], [position]]), 0.25, output=output)
            assert (output == 7).all()

    def test_attention_of_another_form_is_refused(self, best_kernels: Kernels) -> None:
        query, keys = random(2, 4, 1, 32, dtype=torch.float32), random(2, 2, 70, 32, dtype=torch.float32)
        positions = int32([[3], [4]])
        assert best_kernels.attend(query, keys, keys, None, positions, 0.25).isfinite().all()
        refused: list[tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]] = [
            (query[..., :24].contiguous(), keys[..., :24].contiguous(), None, positions, None),
            (query[:, :3], keys, None, positions, None),
            (query, keys[:1], None, positions, None),
            (query, keys.transpose(1, 2).contiguous().transpose(1, 2), None, positions, None),
            (query, keys.bfloat16(), None, positions, None),
            (query.transpose(0, 3).contiguous().transpose(0, 3), keys, None, positions, None),
            (query, keys, int32([0]), positions, None),
            (query, keys, torch.tensor([0, 1]), positions, None),
            (query, keys, None, positions[:1], None),
            (query, keys, None, positions, torch.ones(3)),
            (query, keys, None, positions, torch.ones(4).bfloat16()),
        ]
        for asked, cache, slots, where, sinks in refused:
            with pytest.raises(PlanError):
                best_kernels.attend(asked, cache, cache, slots, where, 0.25, sinks=sinks)


def test_attention_within_blocks_of_positions_is_left_to_the_reference() -> None:
    query, keys, values = random(2, 4, 1, 16, dtype=torch.float32), *torch.randn(2, 3, 2, 32, 16)
    rows = AttentionRows(int32([[9], [30]]), None, 32)
    call = AttentionCall(0, query, keys, values, 0.25, AttentionChunk(8), None, None)
    assert not ops.is_taken(call, keys, values)
    found = ops.OPS.attend_cache(call, rows, query, keys, values)
    assert torch.equal(found, attend_cache(call, rows, query, keys, values))


ROW_TYPES = (torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.bool)


class TestRows:
    @pytest.mark.parametrize("dtype", ROW_TYPES, ids=str)
    @pytest.mark.parametrize("index_type", [torch.int32, torch.int64], ids=str)
    def test_rows_are_selected_as_torch_does(
        self, kernels: Kernels, dtype: torch.dtype, index_type: torch.dtype
    ) -> None:
        source = (torch.randn(7, 11, 5) * 10).to(dtype)
        for dim, size in enumerate(source.shape):
            index = torch.randint(0, size, (13,), dtype=index_type)
            assert same_bits(kernels.select(source, index, dim), source.index_select(dim, index))
        index = torch.randint(0, 7, (2, 3), dtype=index_type)
        assert same_bits(kernels.select(source, index), source[index.long()])

    def test_the_number_of_threads_changes_no_row(self, kernels: Kernels) -> None:
        source, index = torch.randn(50, 4099), torch.randint(0, 50, (300,))
        for count in (1, 2, 3):
            with kernels.with_threads(count):
                assert same_bits(kernels.select(source, index), source[index])

    def test_rows_that_are_not_there_are_refused(self, kernels: Kernels) -> None:
        source = torch.randn(4, 7, 5)
        for dim, wrong in ((0, 4), (0, -1), (1, 7), (2, 5), (2, 2**31 - 1)):
            for index_type in (torch.int32, torch.int64):
                shape = [*source.shape]
                shape[dim] = 3
                output = guarded(shape, torch.float32)
                output.fill_(7)
                with pytest.raises(RefusedError):
                    kernels.select(source, torch.tensor([0, 1, wrong], dtype=index_type), dim, output=output)
                assert (output == 7).all()

    def test_negative_numbers_count_from_the_end_where_torch_has_it_so(self, kernels: Kernels) -> None:
        source = torch.randn(4, 7, 5)
        index = torch.tensor([-7, 6, -1, 0])
        assert same_bits(kernels.select(source, index, 1, wraps=True), source[:, index])
        for wrong in (-8, 7):
            with pytest.raises(RefusedError):
                kernels.select(source, torch.tensor([0, wrong]), 1, wraps=True)

    @pytest.mark.parametrize("dtype", ROW_TYPES, ids=str)
    def test_states_are_written_to_their_slots_and_columns_and_nowhere_else(
        self, kernels: Kernels, dtype: torch.dtype
    ) -> None:
        cache = guarded((4, 2, 9, 6), dtype)
        cache.copy_((torch.randn(4, 2, 9, 6) * 10).to(dtype))
        rows, columns = int32([3, 0, 0, 3]), int32([8, 0, 5, 7])
        wide = (torch.randn(2, 4, 3, 6) * 10).to(dtype)
        for states in (wide[0, :, :2].contiguous(), wide[:, :, 1].transpose(0, 1), wide[0, :, :1].expand(4, 2, 6)):
            expected = cache.clone()
            expected[rows.long(), :, columns.long()] = states
            kernels.write_cache(cache, states, rows, columns)
            check_guards(cache)
            assert same_bits(cache, expected)

    def test_of_tokens_at_one_place_the_last_one_stays(self, kernels: Kernels) -> None:
        cache, states = torch.zeros(2, 1, 3, 4), torch.randn(3, 1, 4)
        kernels.write_cache(cache, states, int32([1, 1, 1]), int32([2, 0, 2]))
        assert same_bits(cache[1, :, 2], states[2]) and same_bits(cache[1, :, 0], states[1])

    def test_slots_and_columns_that_are_not_there_are_refused(self, kernels: Kernels) -> None:
        cache = torch.zeros(4, 2, 9, 6)
        for row, column in ((4, 0), (-1, 0), (0, 9), (0, -1)):
            with pytest.raises(RefusedError):
                kernels.write_cache(cache, torch.ones(2, 2, 6), int32([1, row]), int32([1, column]))
            assert not cache.any()
