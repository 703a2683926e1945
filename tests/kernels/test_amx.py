# SPDX-License-Identifier: Apache-2.0
"""Linear layers and attention by the tile registers of AMX, which are emulated: what is computed, and what the compiled code asks of the hardware."""

from __future__ import annotations

import ctypes
import mmap
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from emulation import EMULATED_AMX
from helpers import artifact_runner, export_tiny, prefill_pieces, random_tokens
from kernel_calls import NAMES, SHORT, Kernels, check_chunks, load_kernels, quantized, random, same_bits
from torch import Tensor

from optimum_neuron.kernels.host import instruction_sets as host
from optimum_neuron.kernels.host import native_build
from optimum_neuron.targets.cpu import loader


BF16 = torch.bfloat16
emulated = pytest.mark.skipif(not EMULATED_AMX, reason="needs AVX512 with bfloat16 products")


@pytest.fixture(scope="module", params=[*EMULATED_AMX, *({"amx_bf16"} & {*NAMES})])
def amx(_compile_cache: None, request: pytest.FixtureRequest) -> Kernels:
    return load_kernels(request.param)


def as_the_manual_has_it(x: Tensor, weight: Tensor) -> Tensor:
    """Intel's sums: of 32 columns at a time, those of even and of odd columns apart; then both, then all before."""
    columns = -(-x.shape[1] // 32) * 32
    left, right = (torch.nn.functional.pad(each.float(), (0, columns - x.shape[1])) for each in (x, weight))
    total = torch.zeros(len(x), len(weight))
    for begin in range(0, columns, 32):
        sums = [torch.zeros_like(total), torch.zeros_like(total)]
        for k in range(32):  # products of two numbers of bfloat16 are exact
            sums[k % 2] += left[:, None, begin + k] * right[None, :, begin + k]
        total += sums[0] + sums[1]
    return total.to(BF16)


@emulated
@pytest.mark.parametrize(("rows", "outputs", "columns"), [(3, 40, 100), (33, 7, 64), (70, 33, 1030)])
def test_sums_are_those_of_the_manual(amx: Kernels, rows: int, outputs: int, columns: int) -> None:
    x, weight = random(rows, columns, dtype=BF16), random(outputs, columns, dtype=BF16)
    assert same_bits(amx.linear(x, weight), as_the_manual_has_it(x, weight))
    # Where the terms cancel, what is left is the rounding of each sum.
    x, weight = torch.cat([x, x.flip(1)], 1), torch.cat([weight, -weight.flip(1)], 1)
    assert same_bits(amx.linear(x, weight), as_the_manual_has_it(x, weight))


def at_the_end(tensor: Tensor) -> Tensor:
    """A copy of less than a page, whose last byte is the last that may be read."""
    memory, size = mmap.mmap(-1, 2 * mmap.PAGESIZE), tensor.numel() * tensor.itemsize
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=mmap.PAGESIZE - size)
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(copy.data_ptr() + size, mmap.PAGESIZE, 0) == 0
    return copy.view(tensor.shape).copy_(tensor)


@emulated
@pytest.mark.parametrize(("rows", "outputs", "columns"), [(1, 1, 1), (5, 5, 33), (3, 16, 95), (2, 33, 32)])
def test_nothing_behind_weights_and_rows_is_read(amx: Kernels, rows: int, outputs: int, columns: int) -> None:
    x, weight, bias = (random(*sizes, dtype=BF16) for sizes in ((rows, columns), (outputs, columns), (outputs,)))
    expected = amx.linear(x, weight, bias)
    own = [at_the_end(each) for each in (x, weight, bias)]
    assert same_bits(amx.linear(*own), expected)


@emulated
def test_tiles_packed_by_several_threads_do_not_reach_into_each_other(amx: Kernels) -> None:
    x, weight = random(145, 4096, dtype=BF16), random(20, 4096, dtype=BF16)  # 10 tiles, none of 16 rows
    expected = torch.cat([amx.linear(row, weight) for row in x.split(1)])
    for count in (1, 2, 3) * 3:
        with amx.with_threads(count):
            assert same_bits(amx.linear(x, weight), expected)


@emulated
def test_subnormal_numbers_count_as_zero(amx: Kernels) -> None:
    smallest = torch.finfo(BF16).smallest_normal
    x, weight = torch.zeros(2, 32, dtype=BF16), torch.ones(16, 32, dtype=BF16)
    x[0, 0], x[1, 0] = smallest, smallest / 2
    assert amx.linear(x, weight * 2).tolist() == [[2 * smallest] * 16, [0.0] * 16]
    assert not amx.linear(x, weight / 2).any()
    # A sum of tiles, too: the bias would show what is left of it.
    x, weight, bias = (torch.full(sizes, smallest, dtype=BF16) for sizes in ((1, 33), (16, 33), (16,)))
    x[:, 1:32], weight[:, 0], weight[:, 32] = 0, 1.5, -1
    assert amx.linear(x, weight, bias).tolist() == [[smallest] * 16]


@emulated
@pytest.mark.slow
def test_a_model_of_bfloat16_gives_the_same_bits_however_it_is_chunked(
    amx: Kernels, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random_tokens(21)
    path = export_tiny(tiny_checkpoint, tmp_path / "artifact", target="cpu", dtype="bfloat16")
    wanted = prefill_pieces(artifact_runner(path), 0, prompt, [16, 5])
    monkeypatch.setattr(loader, "load_kernels", lambda: amx.library([]))
    runner = artifact_runner(path)
    torch.testing.assert_close(check_chunks(runner, prompt), wanted, rtol=2**-5, atol=2**-5)


# Sums, then weights, whose lines are outputs, then rows of x, whose lines are pairs of columns.
_LINEARS = {("0", "4", "6"), ("1", "5", "6"), ("2", "4", "7"), ("3", "5", "7")}
# The same of codes: of many rows as above, of few, which have one tile of x at a time, and of that with two of weights.
_CODED = {
    *_LINEARS,
    *{("1", "5", "6"), ("2", "4", "6"), ("3", "5", "6"), ("0", "6", "4")},
    *((sums, *pair) for sums in "01" for pair in (("6", "2"), ("7", "3"), ("6", "4"), ("7", "5"))),
}
# Of int8: sums, then weights, then rows of x.
_ROUNDED = {("0", "6", "7")}
# Sums, then rows of queries or probabilities, then keys or values, whose lines are pairs.
_ATTENTION = {("0", "4", "5"), ("1", "4", "6"), ("2", "4", "5"), ("3", "4", "6")}


_SOURCES: dict[str, set[tuple[str, ...]]] = {
    "linear/linears.cpp": _LINEARS,
    "linear/experts.cpp": _LINEARS,
    "codes/coded.cpp": _CODED,
    "rounded/rounded.cpp": _ROUNDED,
    "attention/attention.cpp": _ATTENTION,
}


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="needs x86-64")
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
@pytest.mark.parametrize(
    "source", [pytest.param(each, marks=[pytest.mark.full] * (i > 0)) for i, each in enumerate(_SOURCES)]
)
def test_compiled_for_amx_a_thread_configures_multiplies_and_releases_tiles(source: str, tmp_path: Path) -> None:
    product, expected = "tdpbssd" if source.startswith("rounded") else "tdpbf16ps", _SOURCES[source]
    amx_bf16 = next(each for each in host._X86_64 if each.name == "amx_bf16")
    native_build.check_compiler()
    command = [str(native_build.find_compiler()), *native_build._FLAGS, "-O0", *amx_bf16.flags, "-c"]
    target = tmp_path / "object.o"
    subprocess.run([*command, f"-I{native_build.SOURCES}", native_build.SOURCES / source, "-o", target], check=True)
    text = subprocess.check_output(["objdump", "-d", "-M", "intel", target], text=True)
    products = re.findall(r"\b(tdp\w+) tmm(\d),tmm(\d),tmm(\d)", text)
    assert {tuple(tiles) for name, *tiles in products if name == product} == expected
    assert {name for name, *tiles in products} == {product}
    loaded, zeroed, stored = (
        set(re.findall(pattern, text))
        for pattern in (r"\btileloadd tmm(\d),", r"\btilezero tmm(\d)\b", r"\btilestored \[[^]]*\],tmm(\d)")
    )
    operands, sums = {tile for _, *tiles in expected for tile in tiles}, {tile for tile, *_ in expected}
    assert operands <= loaded <= operands | sums and zeroed == stored == sums
    assert re.search(r"\bldtilecfg\b", text) and re.search(r"\btilerelease\b", text)


def test_with_short_scales_the_products_of_bfloat16_are_those_of_plain_weights(amx: Kernels) -> None:
    for group, columns, outputs in ((32, 576, 70), (64, 1536, 33), (96, 960, 20), (128, 128, 5), (256, 768, 37)):
        weight = quantized("int4", outputs, columns, group=group, scale=SHORT)
        plain = weight.dequantize().bfloat16()
        assert torch.equal(plain.float(), weight.dequantize())
        # Of 32 columns, the kernel takes the first of each four first.
        order = torch.arange(columns).view(-1, 8, 4).transpose(1, 2).flatten()
        x, bias = random(40, columns, dtype=torch.bfloat16), random(outputs, dtype=torch.bfloat16)
        for rows in (1, 2, 3, 16, 17, 40):
            expected = amx.linear(x[:rows, order], plain[:, order].contiguous(), bias)
            assert same_bits(amx.linear(x[:rows], weight, bias), expected), (group, rows)
