# SPDX-License-Identifier: Apache-2.0
"""Which values options may have, alone and beside the sizes that they are counted in. A refusal is one sentence. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import pairwise


# Graphs count positions and tokens in int32.
LARGEST_SIZE = 2**31 - 1
# Attention kernels take so many columns at a time, and a block is whole times as many.
SMALLEST_BLOCK = 64
# Weights may be rounded at export to codes of these kinds, or keep a quantized checkpoint's own; those of int4 in groups of so many inputs.
QUANTIZATIONS = ("int8", "int4", "fp8", "checkpoint")
INT4_GROUP_SIZES = (32, 64, 128)
_DTYPE_SPELLINGS = {"float": "float32", "fp32": "float32", "bf16": "bfloat16", "half": "float16", "fp16": "float16"}


def known_name(name: str, value: object, known: tuple[str, ...]) -> None:
    """Raises: TypeError: no option has that name."""
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"the options are {', '.join(known)}"
        raise TypeError(f"unknown option {name!r} = {value!r}; {hint}")


def flag(name: str, value: object) -> None:
    """Raises: TypeError: neither true nor false."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be true or false, not {value!r}")


def choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises: ValueError: none of the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(choices)}")


def dtype(value: object) -> object:
    """torch's name of a type: "bfloat16" of torch.bfloat16, "torch.bfloat16", "bf16" or "BF16". What is none stays as it is."""
    if not isinstance(value, str) and type(value).__name__ != "dtype":
        return value
    name = str(value).lower().removeprefix("torch.")
    return _DTYPE_SPELLINGS.get(name, name)


def size(name: str, value: object) -> int:
    """A whole number from 1 to what graphs can count; it raises TypeError and ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1")
    if value > LARGEST_SIZE:
        raise ValueError(f"{name}={value} is above {LARGEST_SIZE}, as far as graphs count; lower it")
    return value


def count(name: str, value: object, least: int, most: int) -> None:
    """A whole number from `least` to `most`, of an option that may be left out; it raises TypeError and ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number or None, not {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{name}={value} must be between {least} and {most}")


def sizes(name: str, values: object) -> tuple[int, ...]:
    """Sizes, each larger than the one before; it raises TypeError and ValueError otherwise."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list of whole numbers, not {values!r}")
    found = tuple(size(name, value) for value in values)
    if any(later <= earlier for earlier, later in pairwise(found)):
        raise ValueError(f"{name}={found} must ascend without repetition; sort it as {tuple(sorted(set(found)))}")
    return found


def names(name: str, values: object, choices: tuple[str, ...]) -> tuple[str, ...]:
    """Some of the choices, each once; it raises TypeError and ValueError otherwise."""
    found = tuple(values) if isinstance(values, Iterable) and not isinstance(values, str) else (None,)
    if not all(isinstance(value, str) for value in found):
        raise TypeError(f"{name} must be a list of names, not {values!r}")
    for each in found:
        choice(name, each, choices)
    if len(set(found)) != len(found):
        raise ValueError(f"{name}={found} names one twice; name it once")
    return found


def quantization(
    kind: str | None, group_size: int | None, zero_point: bool, exclude: Iterable[str] | None
) -> tuple[str, ...] | None:
    """Checks the options of quantized weights beside each other; returns the patterns of names that are excluded.

    Raises:
        TypeError: the patterns are no list of texts.
        ValueError: an option is out of range, or of another kind of codes.
    """
    if isinstance(exclude, str) or not (
        exclude is None or (isinstance(exclude, Iterable) and all(isinstance(each, str) and each for each in exclude))
    ):
        raise TypeError(f"quantization_exclude must be a list of patterns of names, not {exclude!r}")
    patterns = None if exclude is None else tuple(exclude)
    of_int4 = {"quantization_group_size": group_size, "quantization_zero_point": zero_point or None}
    if kind is None:
        for name, value in (of_int4 | {"quantization_exclude": patterns}).items():
            if value is not None:
                raise ValueError(
                    f"{name}={value!r} is of quantized weights, and there is no quantization; leave it out"
                )
        return None
    choice("quantization", kind, QUANTIZATIONS)
    if kind == "checkpoint" and patterns is not None:
        raise ValueError(
            f"quantization_exclude={patterns!r} is of weights that are rounded, and quantization='checkpoint' keeps codes as they are; "
            f"leave out one of them"
        )
    for name, value in of_int4.items():
        if value is not None and kind != "int4":
            raise ValueError(f"{name}={value!r} is of int4, and quantization={kind!r}; leave out one of them")
    if group_size is not None and group_size not in INT4_GROUP_SIZES:
        sizes_of_groups = ", ".join(map(str, INT4_GROUP_SIZES))
        raise ValueError(f"quantization_group_size={group_size!r} is not known; choose one of {sizes_of_groups}")
    return patterns


def blocks(block: int | None, tokens: int | None, length: int) -> None:
    """Checks `kv_block_size` and `kv_cache_tokens` beside a valid `sequence_length`.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: tokens without blocks, or sizes that are not whole blocks.
    """
    if block is None:
        if tokens is not None:
            raise ValueError(
                f"kv_cache_tokens={tokens} is of a cache of blocks, and kv_block_size is left out; give both, as "
                f"kv_block_size=128, or neither"
            )
        return
    size("kv_block_size", block)
    if block < SMALLEST_BLOCK or block & (block - 1):
        raise ValueError(
            f"kv_block_size={block} must be a power of two of at least {SMALLEST_BLOCK}, as 128; choose another"
        )
    if length % block:
        raise ValueError(
            f"sequence_length={length} is not a multiple of kv_block_size={block}; make it {-(-length // block) * block}, "
            f"or choose smaller blocks"
        )
    if tokens is None:
        return
    size("kv_cache_tokens", tokens)
    if tokens < length or tokens % block:
        raise ValueError(
            f"kv_cache_tokens={tokens} must be a multiple of kv_block_size={block} and hold one request of "
            f"sequence_length={length} at least; make it {max(length, -(-tokens // block) * block)}"
        )


def cached_tokens(rows: int, length: int) -> None:
    """Raises: ValueError: slots of more tokens than graphs count."""
    if rows * length > LARGEST_SIZE:
        raise ValueError(
            f"batch_size={rows} requests of sequence_length={length} tokens are a KV cache of {rows * length:,} tokens, and graphs count to "
            f"{LARGEST_SIZE:,}; lower one of them"
        )


def chunk_buckets(buckets: tuple[int, ...], chunk: int) -> None:
    """Raises: ValueError: ascending `prefill_chunk_buckets` that reach `prefill_chunk_size`."""
    if buckets and buckets[-1] >= chunk:
        raise ValueError(
            f"prefill_chunk_buckets={buckets} must all be smaller than prefill_chunk_size={chunk}; leave out the larger ones"
        )


def context_buckets(buckets: tuple[int, ...], length: int, block: int | None) -> None:
    """Raises: ValueError: ascending `context_buckets` that do not end with `sequence_length`, or are not whole blocks."""
    if buckets[-1:] != (length,):
        raise ValueError(
            f"context_buckets={buckets} must end with sequence_length={length}; add {length} as the "
            f"last bucket and nothing above it"
        )
    uneven = [bucket for bucket in buckets if bucket % (block or 1)]
    if uneven:
        raise ValueError(f"context_buckets={buckets} must be multiples of kv_block_size={block}; change {uneven}")
