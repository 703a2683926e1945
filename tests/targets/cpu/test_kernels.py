# SPDX-License-Identifier: Apache-2.0
"""The own CPU kernels against float64, and equal to the bit where they must be; graphs without them elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import examples, load_model, mixed_spec, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import linear

from optimum_neuron.graphs.attention import AttentionRows, attend_cache
from optimum_neuron.graphs.checks.inspect import inspect_model
from optimum_neuron.graphs.interface import AttentionCall
from optimum_neuron.graphs.kv_cache import KVCache
from optimum_neuron.graphs.masks import AttentionChunk
from optimum_neuron.graphs.spec import state_specs
from optimum_neuron.targets.cpu import kernels, worker
from optimum_neuron.targets.cpu.attention import attend_cache_on_cpu
from optimum_neuron.targets.cpu.host import CPU_VARIABLE
from optimum_neuron.targets.cpu.package import Facts
from optimum_neuron.targets.cpu.rewrite import use_linear_kernel


HERE = kernels.are_fast_here()
NAN = float("nan")

with_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def random(*sizes: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(sizes).to(dtype)


def int32(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


def all_equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_kernels_are_fast_where_the_cpu_has_their_instructions() -> None:
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text(encoding="utf-8", errors="replace").split() if cpuinfo.is_file() else []
    needed = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"}
    assert (needed.issubset(flags) and CPU_VARIABLE not in os.environ) == HERE


def test_a_library_of_an_earlier_version_is_loaded_though_it_lacks_an_operator(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    earlier = torch.library.Library("optimum_neuron_earlier", "FRAGMENT")
    earlier.define("linears(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor[]")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    kernels.load(tmp_path / "kernels.so", "optimum_neuron_earlier")
    with torch.device("meta"):
        (found,) = torch.ops.optimum_neuron_earlier.linears(torch.ones(3, 8), [torch.ones(4, 8)], [None])
    assert found.shape == (3, 4)


@pytest.mark.parametrize("own_kernels", [False, True] if HERE else [False])
def test_graphs_call_the_kernels_only_where_they_are_used(
    own_kernels: bool, request: pytest.FixtureRequest, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if own_kernels:
        request.getfixturevalue("ops")
    programs: list[torch.export.ExportedProgram] = []
    monkeypatch.setattr(
        torch._inductor, "aoti_compile_and_package", lambda program, **_: programs.append(program), raising=True
    )
    # A step of many tokens: no number of rows is left to torch, which would round by it.
    config = tiny_config(sequence_length=256, prefill_chunk_size=100, context_buckets=(256,))
    model = load_model(tiny_checkpoint)
    spec = inspect_model(model)
    facts = Facts(spec, config.dtype, *((kernels.namespace(), "0" * 64) if own_kernels else (None, None)))
    monkeypatch.setattr(worker, "open_package", lambda path: None)
    job = {"graph": asdict(mixed_spec(config)), "output": "unused.pt2"}
    assert worker._compile(model, KVCache(state_specs(config, spec)), job, facts) == {}
    own = [str(node.target) for node in programs[0].graph.nodes if kernels.namespace() in str(node.target)]
    names = {name.split(".")[1] for name in own}
    assert names == ({"linears", "attend"} if own_kernels else set())
    assert own_kernels != any(node.target is torch.ops.aten.linear.default for node in programs[0].graph.nodes)


@pytest.mark.skipif(not HERE, reason="the own kernels do not run here")
@pytest.mark.usefixtures("ops")
def test_layers_that_feed_one_another_are_rewritten_as_layers_side_by_side_are() -> None:
    model = nn.Sequential(nn.Linear(16, 4, bias=False), nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 8)).requires_grad_(
        False
    )
    inputs = torch.randn(5, 16)
    program = torch.export.export(model, (inputs,))
    use_linear_kernel(program)
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count(f"{kernels.namespace()}.linears.default") == 3 and "aten.linear.default" not in targets
    torch.testing.assert_close(program.module()(inputs), model(inputs))


# No multiples of a vector, of a chunk of columns, of a panel or of a tile; one layer, several, and an empty one.
LINEARS = [(1, [1]), (31, [5, 3]), (33, [4]), (100, [37]), (576, [192, 64, 64]), (64, [0, 6]), (2050, [130, 7])]
# Of one tile, of one block and of several, each with tiles of even and uneven heights.
ROWS = (1, 2, 5, 6, 7, 13, 24, 25, 32, 72, 145)


class TestLinears:
    __test__ = HERE  # where the kernels cannot run, nothing is to be tested of them

    @with_dtypes
    @pytest.mark.parametrize(("columns", "outputs"), LINEARS)
    def test_linears_match_float64(self, ops: Any, dtype: torch.dtype, columns: int, outputs: list[int]) -> None:
        weights = [random(size, columns, dtype=dtype) for size in outputs]
        biases = [random(size, dtype=dtype) if index % 2 == 0 else None for index, size in enumerate(outputs)]
        x = random(max(ROWS), columns, dtype=dtype)
        for rows in ROWS:
            results = ops.linears(x[:rows], weights, biases)
            for result, weight, bias in zip(results, weights, biases, strict=True):
                exact = linear(x[:rows].double(), weight.double(), None if bias is None else bias.double())
                terms = linear(x[:rows].double().abs(), weight.double().abs()) + 1
                rounding = exact.abs() * 2**-8 if dtype == torch.bfloat16 else 0
                assert result.dtype == dtype and result.shape == exact.shape
                assert ((result.double() - exact).abs() <= terms * 2**-21 + rounding).all()

    @with_dtypes
    @pytest.mark.parametrize(("columns", "outputs"), [(33, [5, 3]), (2050, [130, 7]), (1000, [3001, 1003])])
    def test_a_row_of_linears_depends_on_nothing_else(
        self, ops: Any, dtype: torch.dtype, columns: int, outputs: list[int]
    ) -> None:
        weights = [random(size, columns, dtype=dtype) for size in outputs]
        biases = [random(outputs[0], dtype=dtype), None]
        x = random(300, columns, dtype=dtype)
        whole = ops.linears(x, weights, biases)
        for rows in range(1, 300) if columns < 100 else (*range(1, 50, 6), *ROWS, 299):
            assert all_equal(ops.linears(x[:rows], weights, biases), [result[:rows] for result in whole])
        order = torch.randperm(300)
        assert all_equal(ops.linears(x[order], weights, biases), [result[order] for result in whole])
        for index in range(2):
            assert torch.equal(ops.linears(x, weights[index : index + 1], biases[index : index + 1])[0], whole[index])
        poisoned = x.clone()
        poisoned[3] = NAN
        for result, clean in zip(ops.linears(poisoned, weights, biases), whole, strict=True):
            assert result[3].isnan().all()
            assert torch.equal(result[4:], clean[4:]) and torch.equal(result[:3], clean[:3])

    @examples(100)
    @given(st.sampled_from([torch.bfloat16, torch.float32]), st.data())
    def test_no_size_changes_a_row_of_linears(self, ops: Any, dtype: torch.dtype, data: st.DataObject) -> None:
        columns = data.draw(st.one_of(st.integers(1, 200), st.integers(1, 3000)), "columns")
        outputs = data.draw(st.integers(1, 150), "outputs")
        rows = data.draw(st.integers(1, 300), "rows")
        first = data.draw(st.integers(0, rows - 1), "first")
        stop = data.draw(st.integers(first + 1, rows), "stop")
        begin = data.draw(st.integers(0, outputs - 1), "begin")
        x, weight, bias = (random(*sizes, dtype=dtype) for sizes in ((rows, columns), (outputs, columns), (outputs,)))
        (whole,) = ops.linears(x, [weight], [bias])
        (part,) = ops.linears(x[first:stop], [weight[begin:]], [bias[begin:]])
        assert torch.equal(part, whole[first:stop, begin:])

    @with_dtypes
    def test_linears_take_any_view_of_rows_and_refuse_the_rest(self, ops: Any, dtype: torch.dtype) -> None:
        x, weight = random(2, 3, 64, dtype=dtype), random(40, 64, dtype=dtype)
        (result,) = ops.linears(x, [weight], [None])
        assert result.shape == (2, 3, 40)
        assert torch.equal(ops.linears(x.transpose(0, 1), [weight], [None])[0], result.transpose(0, 1))
        assert torch.equal(ops.linears(x[1, 2], [weight], [None])[0], result[1, 2])
        refused: list[tuple[Tensor, Tensor, Tensor | None, str]] = [
            (x[:0], weight, None, "input \\[0, 3, 64\\] is empty"),
            (x.half(), weight.half(), None, "bfloat16 or float32 expected, not Half"),
            (x, weight.double(), None, "contiguous and"),
            (x, weight.T.contiguous().T, None, "contiguous and"),
            (x, weight[:, :60], None, "weight \\[40, 60\\]"),
            (x, weight, random(41, dtype=dtype), "bias of another size"),
        ]
        for rows, parameters, bias, words in refused:
            with pytest.raises(RuntimeError, match=words):
                ops.linears(rows, [parameters], [bias])


def attend_exactly(
    query: Tensor, keys: Tensor, values: Tensor, seq_ids: Tensor | None, positions: Tensor, scaling: float, window: int
) -> Tensor:
    """The contract in float64; what is not finite in the cache must not be seen."""
    rows, heads = query.shape[:2]
    slots = torch.arange(rows) if seq_ids is None else seq_ids
    key, value = (
        cache[slots].double().nan_to_num(0, 0, 0).repeat_interleave(heads // keys.shape[1], 1)
        for cache in (keys, values)
    )
    columns, last = torch.arange(keys.shape[2]), positions[:, :, None]
    visible = (columns <= last) & (columns > last - (window or columns.numel() + 1))
    scores = (query.double() @ key.transpose(2, 3) * scaling).masked_fill(~visible[:, None], -1e300)
    return ((scores.softmax(-1) @ value) * visible.any(2)[:, None, :, None]).transpose(1, 2)


def make_cache(
    slots: int, kv_heads: int, columns: int, dim: int, seen: dict[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values with NaN and infinity in every column that `seen` (slot to last position) does not cover."""
    keys, values = (random(slots, kv_heads, columns, dim, dtype=dtype) for _ in range(2))
    for slot in range(slots):
        keys[slot, :, seen.get(slot, -1) + 1 :] = NAN
        values[slot, :, seen.get(slot, -1) + 1 :] = NAN if slot % 2 else float("inf")
    return keys, values


# heads, kv heads, dim, columns, window
SHAPES = [(4, 4, 16, 64, 0), (9, 3, 64, 200, 0), (4, 2, 48, 130, 7), (8, 1, 128, 333, 65), (6, 3, 256, 65, 100)]
with_shapes = pytest.mark.parametrize(("heads", "kv_heads", "dim", "columns", "window"), SHAPES)


class TestAttend:
    __test__ = HERE  # where the kernels cannot run, nothing is to be tested of them

    @with_dtypes
    @with_shapes
    @pytest.mark.parametrize("tokens", [1, 37])
    @pytest.mark.parametrize("by_slot", [False, True])
    def test_attend_matches_float64(
        self,
        ops: Any,
        dtype: torch.dtype,
        heads: int,
        kv_heads: int,
        dim: int,
        columns: int,
        window: int,
        tokens: int,
        by_slot: bool,
    ) -> None:
        rows, slots = 3, 5
        seq_ids = int32([4, 0, 2]) if by_slot else None
        positions = torch.randint(-1, columns, (rows, tokens), dtype=torch.int32)
        positions[1, 0] = -1
        positions[2, 0] = columns - 1
        seen = {
            int(slot): int(positions[row].max()) for row, slot in enumerate([0, 1, 2] if seq_ids is None else seq_ids)
        }
        keys, values = make_cache(slots, kv_heads, columns, dim, seen, dtype)
        query = random(rows, tokens, heads, dim, dtype=dtype).transpose(1, 2)
        inputs = (query, keys, values, seq_ids, positions, dim**-0.5, window)
        result = ops.attend(*inputs)
        assert result.dtype == dtype and result.shape == (rows, tokens, heads, dim)
        assert not result[positions < 0].any()
        error = (result.double() - attend_exactly(*inputs)).abs().max()
        assert error < (2e-2 if dtype == torch.bfloat16 else 5e-6)

    @with_dtypes
    @with_shapes
    def test_a_token_of_attend_depends_on_nothing_else(
        self, ops: Any, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, columns: int, window: int
    ) -> None:
        tokens, scaling = min(columns, 100) - 3, dim**-0.5
        positions = torch.arange(columns - tokens, columns, dtype=torch.int32)[None]
        keys, values = make_cache(3, kv_heads, columns, dim, {1: columns - 1}, dtype)
        query = random(1, tokens, heads, dim, dtype=dtype).transpose(1, 2)
        slot = int32([1])
        whole = ops.attend(query, keys, values, slot, positions, scaling, window)
        for size in (1, 7, 33):
            pieces = [
                ops.attend(part, keys, values, slot, where, scaling, window)
                for part, where in zip(query.split(size, 2), positions.split(size, 1), strict=True)
            ]
            assert torch.equal(torch.cat(pieces, 1), whole)
        # As rows of one token, as in decoding, with an idle row among them.
        alone, idle = query.permute(2, 1, 0, 3), torch.where(torch.arange(tokens) == 5, -1, positions[0])[:, None]
        decoded = ops.attend(alone, keys, values, slot.expand(tokens), idle.int(), scaling, window)
        assert not decoded[5].any()
        decoded[5] = whole[0, 5]
        assert torch.equal(decoded[:, 0], whole[0])
        # The same columns in a smaller cache, after which and before whose window there is poison.
        stop = columns // 2 + 1
        first = max(0, stop - window) if window else 0
        for poison in (NAN, float("inf")):
            small_keys, small_values = (
                torch.full((1, kv_heads, stop + 9, dim), poison, dtype=dtype) for _ in range(2)
            )
            small_keys[0, :, first:stop], small_values[0, :, first:stop] = (
                keys[1, :, first:stop],
                values[1, :, first:stop],
            )
            among = torch.randint(-1, stop + 9, (1, 5), dtype=torch.int32)
            among[0, 3] = stop - 1
            results = ops.attend(query[:, :, :5], small_keys, small_values, None, among, scaling, window)
            same = ops.attend(query[:, :, 3:4], keys, values, slot, int32([[stop - 1]]), scaling, window)
            assert torch.equal(results[0, 3], same[0, 0]) and same.isfinite().all()

    @with_dtypes
    def test_attend_shows_what_a_token_sees_and_refuses_what_is_not_there(self, ops: Any, dtype: torch.dtype) -> None:
        query, keys = random(1, 2, 1, 16, dtype=dtype), random(2, 1, 70, 16, dtype=dtype)
        for column in (0, 63, 69):
            poisoned = keys.clone()
            poisoned[1, :, column] = NAN
            for pair in ((poisoned, keys), (keys, poisoned)):
                assert ops.attend(query, *pair, int32([1]), int32([[69]]), 0.25, 0).isnan().all()
                assert ops.attend(query, *pair, int32([0]), int32([[69]]), 0.25, 0).isfinite().all()
        for slot, position, words in ((2, 0, "seq_ids 2"), (-1, 0, "seq_ids -1"), (0, 70, "position_ids 70")):
            with pytest.raises(RuntimeError, match=words):
                ops.attend(query, keys, keys, int32([slot]), int32([[position]]), 0.25, 0)


def test_attention_within_blocks_of_positions_is_left_to_the_reference() -> None:
    query, keys, values = random(2, 4, 1, 16, dtype=torch.float32), *torch.randn(2, 3, 2, 32, 16)
    rows = AttentionRows(int32([[9], [30]]), None, 32)
    call = AttentionCall(0, query, keys, values, 0.25, AttentionChunk(8), None, None)
    found = attend_cache_on_cpu(call, rows, query, keys, values)
    assert torch.equal(found, attend_cache(call, rows, query, keys, values))
