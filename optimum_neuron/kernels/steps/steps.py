# SPDX-License-Identifier: Apache-2.0
"""Steps over buffers, as plain data that is written as JSON. Imports no torch.

A step's `by_token` names the operands with a row per token, where a token's results depend on those rows alone. `changed` names those
that it changes in place, of which the rest stays as it was. A step writes to its `output` too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .operands import Buffer, Codes, Layer, Operand, Tokens


# The operators of a Map, numbered as in native/map/map.h.
_OPS = """
    load store add sub mul div max min pow iadd isub imul imax imin iand ior ixor ifloor_div lt le gt ge eq ne
    ilt ile igt ige ieq ine where neg abs exp log sqrt rsqrt reciprocal sigmoid silu tanh erf gelu gelu_tanh relu sin cos floor ceil
    round trunc isnan expm1 log1p softplus round_bfloat16 round_float16 ineg iabs inot to_float to_int to_bool
    ito_bool sum row_max row_min isum irow_max irow_min spread rotate_half
"""
OPS = _OPS.split()
REDUCTIONS = frozenset(["sum", "row_max", "row_min", "isum", "irow_max", "irow_min"])


@dataclass(frozen=True)
class Item:
    """An operator of a Map on registers, or numbers where it takes a constant; `access` is what `load` reads or `store` writes.

    With `rows` it has one element per row, not per column.
    """

    op: str
    to: int
    operands: tuple[int | float, ...] = ()
    constants: tuple[bool, ...] = ()
    rows: bool = False
    access: Operand | None = None


@dataclass(frozen=True)
class Map:
    """Operators over `rows` times `columns` elements; one row where none takes whole rows. `tokens` count its first dimension."""

    rows: int
    columns: int
    registers: int
    items: tuple[Item, ...]
    tokens: Tokens | None = None

    @property
    def needs_rows(self) -> bool:
        """Return whether an operator takes whole rows, or has an element of each."""
        return any(item.rows or item.op == "rotate_half" for item in self.items)


@dataclass(frozen=True)
class Linears:
    """Linear layers that share their input `x [rows, columns]`."""

    x: Operand
    layers: tuple[Layer, ...]
    tokens: Tokens | None = None
    by_token: ClassVar = ("x",)


@dataclass(frozen=True)
class Experts:
    """`y[t, i] = x[t] @ weight[index[t, i]].T + bias[index[t, i]]`; x may have a row per expert."""

    x: Operand
    index: Operand
    weight: Operand
    bias: Operand | None
    output: Operand
    codes: Codes | None = None
    tokens: Tokens | None = None
    by_token: ClassVar = ("x", "index")


@dataclass(frozen=True)
class Attend:
    """Attention of `query [rows, heads, tokens, dim]` over `keys`, `values [blocks, kv_heads, columns, dim]`, numbers or codes.

    `positions [rows, tokens]` and `blocks [rows, n]`, or `[rows]`, are int32, `sinks [heads]` float32. `blocks` are those of each
    row, in order; without them, row i has block i. `column_bias [heads, n]` float32 has a number for each column that a row may have,
    up to a whole number of the kernel's blocks. Codes have `key_scale`, `value_scale [blocks, kv_heads, columns, 1]` float32.
    """

    query: Operand
    keys: Operand
    values: Operand
    blocks: Operand | None
    positions: Operand
    sinks: Operand | None
    column_bias: Operand | None
    output: Operand
    scaling: float
    window: int
    softcap: float
    key_scale: Operand | None = None
    value_scale: Operand | None = None
    tokens: Tokens | None = None


@dataclass(frozen=True)
class Select:
    """`output[o, i] = source[o, index[i]]`, of contiguous tensors; `index` chooses along dimension `dim`.

    A negative index counts from the end where it `wraps`; else it is refused. With `of_live` the source has a row per token, and a live
    row of the output has a live one.
    """

    source: Operand
    index: Operand
    output: Operand
    dim: int
    wraps: bool
    of_live: bool = False
    tokens: Tokens | None = None


@dataclass(frozen=True)
class MatMul:
    """`output[i] = left[i] @ right[i]`, of contiguous `[matrices, rows, inner]` and `[matrices, inner, columns]` in float32."""

    left: Operand
    right: Operand
    output: Operand
    tokens: Tokens | None = None
    by_token: ClassVar = ("left", "right")


@dataclass(frozen=True)
class TopK:
    """The largest of each row of `source [..., columns]` float32, the largest first, and their columns, int32; NaN before all others."""

    source: Operand
    values: Operand
    columns: Operand
    tokens: Tokens | None = None
    by_token: ClassVar = ("source",)
    writes: ClassVar = ("values", "columns")


@dataclass(frozen=True)
class Gather:
    """`output[..., i] = source[..., index[..., i]]`, of contiguous tensors and int32 indices."""

    source: Operand
    index: Operand
    output: Operand
    tokens: Tokens | None = None
    by_token: ClassVar = ("source", "index")


@dataclass(frozen=True)
class Scatter:
    """`output = source`, but `output[..., index[..., i]] = values[..., i]`, or one `value`, of contiguous tensors and int32 indices."""

    source: Operand
    index: Operand
    output: Operand
    values: Operand | None
    value: float
    tokens: Tokens | None = None
    by_token: ClassVar = ("source", "values", "index")


@dataclass(frozen=True)
class WriteCache:
    """`cache[blocks[t], :, columns[t]] = states[t]`, of `cache [blocks, heads, columns, dim]`, `states [tokens, heads, dim]`."""

    cache: Operand
    states: Operand
    blocks: Operand
    columns: Operand
    tokens: Tokens | None = None
    by_token: ClassVar = ("states", "blocks", "columns")
    changed: ClassVar = ("cache",)


@dataclass(frozen=True)
class WriteCodes:
    """`states [tokens, heads, dim]` rounded to `codes [blocks, heads, columns, dim]`, int8 or float8_e4m3fn, by each head of a token, with
    its `scale [blocks, heads, columns, 1]` float32: at `blocks[t], :, columns[t]`.
    """

    codes: Operand
    scale: Operand
    states: Operand
    blocks: Operand
    columns: Operand
    tokens: Tokens | None = None
    by_token: ClassVar = ("states", "blocks", "columns")
    changed: ClassVar = ("codes", "scale")


@dataclass(frozen=True)
class Convolve:
    """A short causal convolution of each channel over the tokens of each slot, which keeps its last `past` inputs.

    `inputs [tokens, channels]` and `state [slots + 1, past, channels]` have one type; the last row of `weight [past + 1, channels]`
    is for a token's own input, `bias [channels]` and `output [tokens, channels]` float32; `slots`, `positions [tokens]` int32.
    """

    inputs: Operand
    weight: Operand
    bias: Operand | None
    state: Operand
    slots: Operand
    positions: Operand
    output: Operand
    tokens: Tokens | None = None
    by_token: ClassVar = ("inputs", "slots", "positions")
    changed: ClassVar = ("state",)


@dataclass(frozen=True)
class Walk:
    """A recurrence, token by token: `S = decay * S; d = value, or share * (value - key @ S); S += outer(key, d); output = query @ S`.

    `query`, `key [tokens, key_heads, key_dim]`, `value`, `output [tokens, heads, value_dim]`, `decay [tokens, heads, 1 or key_dim]`,
    `share [tokens, heads]` and `state [slots + 1, heads, key_dim, value_dim]` are float32; `slots`, `positions [tokens]` int32.
    With `rates [key_dim, value_dim]`, a state decays by `exp(rates * decay)`, of `decay [tokens, heads, value_dim]`.
    """

    query: Operand
    key: Operand
    value: Operand
    decay: Operand
    share: Operand | None
    rates: Operand | None
    state: Operand
    slots: Operand
    positions: Operand
    output: Operand
    tokens: Tokens | None = None
    by_token: ClassVar = ("query", "key", "value", "decay", "share", "slots", "positions")
    changed: ClassVar = ("state",)


@dataclass(frozen=True)
class Sample:
    """The on-device sampler: from `logits [rows, vocab]`, `params [rows, 4]` and `uniforms [rows]` to int32 `output [rows]`."""

    logits: Operand
    params: Operand
    uniforms: Operand
    output: Operand
    tokens: Tokens | None = None
    by_token: ClassVar = ("logits", "params", "uniforms")


_OfTables = Select | TopK | Gather | Scatter | WriteCache | WriteCodes
Step = Map | Linears | Experts | MatMul | Attend | Convolve | Walk | Sample | _OfTables


@dataclass(frozen=True)
class PlanData:
    """A graph's steps over buffers; `once` is computed when it is bound, and `arena` are bytes of what lives within a step."""

    buffers: tuple[Buffer, ...]
    once: tuple[Step, ...]
    steps: tuple[Step, ...]
    arena: int = 0
