# SPDX-License-Identifier: Apache-2.0
"""Maps of random items, and what those that are accepted mean, told by shapes and bits of tensors."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from kernel_calls import Tensors, guarded
from torch import Tensor

from optimum_neuron.kernels.host import native_build
from optimum_neuron.kernels.run.encode import encode_step
from optimum_neuron.kernels.steps.access import PlanError
from optimum_neuron.kernels.steps.steps import OPS, Item, Map


NATIVE = native_build.SOURCES / "map"


def templates() -> dict[str, str]:
    """By which function of native/map/map.cpp each operator is computed, which tells what it reads."""
    listed = re.search(r"enum class Op.*?\{(.*?)\}", (NATIVE / "map.h").read_text(), re.DOTALL)
    assert listed
    *names, _ = re.findall(r"\bk\w+", listed[1])
    functions = dict(re.findall(r"case Op::(k\w+):\s+return (\w+)", (NATIVE / "map.cpp").read_text()))
    return {name: functions[each] for name, each in zip(OPS, names, strict=True)}


TEMPLATES = templates()
OPERANDS = {"load": 0, "binary": 2, "arithmetic": 2, "choose": 3}
SIGN = -(2**31)
# Operators by what they make of the bits of registers; others round, or compare floats.
ON_BITS: dict[str, Callable[..., Tensor]] = {
    "neg": lambda a: a ^ SIGN,
    "abs": lambda a: a & ~SIGN,
    "iadd": lambda a, b: a + b,
    "isub": lambda a, b: a - b,
    "imul": lambda a, b: a * b,
    "imax": torch.maximum,
    "imin": torch.minimum,
    "iand": lambda a, b: a & b,
    "ior": lambda a, b: a | b,
    "ixor": lambda a, b: a ^ b,
    "ilt": lambda a, b: (a < b).int(),
    "ige": lambda a, b: (a >= b).int(),
    "ieq": lambda a, b: (a == b).int(),
    "where": lambda a, b, c: torch.where(c != 0, a, b),
    "ineg": lambda a: -a,
    "inot": lambda a: (a == 0).int(),
    "ito_bool": lambda a: (a != 0).int(),
    "isum": lambda a: a.sum(-1, dtype=torch.int32),
    "irow_max": lambda a: a.amax(-1),
    "irow_min": lambda a: a.amin(-1),
    "rotate_half": lambda a: torch.cat([a[:, a.shape[1] // 2 :] ^ SIGN, a[:, : a.shape[1] // 2]], 1),
}
LOADED: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float32: lambda x: x.view(torch.int32),
    torch.int32: lambda x: x,
    torch.bfloat16: lambda x: x.view(torch.int16).int() << 16,
    torch.int64: lambda x: x.int(),
    torch.bool: lambda x: x.int(),
    torch.int8: lambda x: x.int(),
}
STORED: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float32: lambda x: x.view(torch.float32),
    torch.int32: lambda x: x,
    torch.int64: lambda x: x.long(),
    torch.bool: lambda x: x.byte(),
}


class RandomMap:
    """Items of all kinds, of which those are kept that are accepted; and what they mean, as tensors of registers.

    A register whose values only the kernels know is None in `values`, and has its shape in `shapes`.
    """

    def __init__(self, seed: int, rows: int, columns: int) -> None:
        self.map = Map(rows, columns, 0, ())
        self.tensors = Tensors()
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.values: dict[int, Tensor | None] = {}
        self.outputs: list[tuple[Tensor, Tensor | None]] = []
        self._random = random.Random(seed)
        self._numbers = torch.Generator().manual_seed(seed)

    def _draw(self, *choices: Any) -> Any:
        return self._random.choice(choices)

    def grow(self) -> None:
        """An item more, if it is accepted."""
        held = len(self.tensors.held)
        name = self._draw("load", "store", "spread", *self._random.sample([*ON_BITS], 5), *self._random.sample(OPS, 4))
        count = self._draw(*[OPERANDS.get(TEMPLATES[name], 1)] * 20, 0, 1, 2, 3)
        constants = tuple(self._random.random() < 0.2 for _ in range(count))
        operands = tuple(
            self._draw(1, -7) if each else self._draw(*self.shapes, *self.shapes, -1, 4) for each in constants
        )
        rows = self._draw(False, True)
        to = -1 if name == "store" else self._random.randint(-1, 5)
        tensor = self._tensor(name, rows) if name in ("load", "store") else None
        item = Item(name, to, operands, constants, rows, None if tensor is None else self.tensors(tensor))
        items = (*self.map.items, item)
        grown = replace(self.map, registers=min(5, len(items)), items=items)
        try:
            encode_step(grown, self.tensors.buffers)
        except PlanError:
            del self.tensors.held[held:]
        else:
            self.map = grown
            self._follow(item, tensor)

    def _tensor(self, name: str, rows: bool) -> Tensor:
        """Memory of an access, amid guards."""
        shape: tuple[int, ...] = (self.map.rows,) if rows else (self.map.rows, self.map.columns)
        dtype = self._draw(*(LOADED if name == "load" else STORED))
        layout = (
            self._draw("plain", "plain", "turned", "repeated") if name == "load" else self._draw("plain", "turned")
        )
        own = (1,) if layout == "repeated" else shape[::-1] if layout == "turned" else shape
        memory = guarded(own, dtype)
        limits = (0, 2) if dtype == torch.bool else (-100, 100) if dtype == torch.int8 else (-(2**31), 2**31)
        bits = memory if not dtype.is_floating_point else memory.view({2: torch.int16, 4: torch.int32}[dtype.itemsize])
        limits = (-(2**15), 2**15) if dtype.itemsize == 2 else limits
        bits.copy_(torch.randint(*limits, own, generator=self._numbers))
        return memory.expand(shape) if layout == "repeated" else memory.t() if layout == "turned" else memory

    def _follow(self, item: Item, tensor: Tensor | None) -> None:
        whole, of_rows = (self.map.rows, self.map.columns), (self.map.rows,)
        own = of_rows if item.rows else whole
        reads = {"reduce": whole, "rotateHalf": whole, "spread": of_rows}.get(TEMPLATES[item.op], own)
        leaves = {"reduce": of_rows, "rotateHalf": whole, "spread": whole}.get(TEMPLATES[item.op], own)
        assert len(item.operands) == OPERANDS.get(TEMPLATES[item.op], 1)
        read = [int(each) for each, constant in zip(item.operands, item.constants, strict=True) if not constant]  # type: ignore[arg-type]
        assert all(self.shapes[each] == reads for each in read), item
        if item.op == "store":
            assert tensor is not None
            value = self.values[read[0]]
            stored = None if value is None else STORED[tensor.dtype](value)
            self.outputs.append((tensor, stored))
            return
        assert own == leaves
        self.shapes[item.to] = leaves
        self.values[item.to] = self._value(item, tensor)

    def _value(self, item: Item, tensor: Tensor | None) -> Tensor | None:
        if item.op == "load":
            assert tensor is not None
            return LOADED[tensor.dtype](tensor.contiguous())
        operands = [
            torch.tensor(each, dtype=torch.int32) if constant else self.values[int(each)]  # type: ignore[arg-type]
            for each, constant in zip(item.operands, item.constants, strict=True)
        ]
        if any(each is None for each in operands):
            return None
        if item.op == "spread":
            return operands[0][:, None].expand(-1, self.map.columns)  # type: ignore[index]
        return ON_BITS[item.op](*operands) if item.op in ON_BITS else None


def bits_of(tensor: Tensor) -> Tensor:
    """The memory of a tensor as integers: what a kernel stored as a truth may be another number."""
    whole = {1: torch.uint8, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    return tensor.view(whole)
