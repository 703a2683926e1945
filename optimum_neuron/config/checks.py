# SPDX-License-Identifier: Apache-2.0
"""Checks of the values of options, alone and with each other. A refusal is one sentence with both values and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from . import graph_options as known
from .graph_sizes import GraphSizes


def check_choice(name: str, value: object, choices: tuple[str | int, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(map(str, choices))}")


def check_size(name: str, value: object, least: int = 1, most: int = known.LARGEST_SIZE) -> int:
    """Return a whole number of a range; raise TypeError or ValueError for another value."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if most < known.LARGEST_SIZE and not least <= value <= most:
        raise ValueError(f"{name}={value} must be between {least} and {most}")
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}")
    if value > most:
        raise ValueError(f"{name}={value} is above {most}, as far as graphs count; lower it")
    return value


def take_sizes(name: str, values: object) -> tuple[int, ...]:
    """Return ascending sizes; raise TypeError or ValueError for another value."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list of whole numbers, not {values!r}")
    found = tuple(check_size(name, value) for value in values)
    if any(later <= earlier for earlier, later in pairwise(found)):
        raise ValueError(f"{name}={found} must ascend without repetition; sort it as {tuple(sorted(set(found)))}")
    return found


def take_names(name: str, values: object, what: str = "names") -> tuple[str, ...]:
    """Return a tuple of texts; raise TypeError for another value."""
    found = tuple(values) if isinstance(values, Iterable) and not isinstance(values, str) else (None,)
    if not all(isinstance(each, str) and each for each in found):
        raise TypeError(f"{name} must be a list of {what}, not {values!r}")
    return found


def check_values(config: GraphSizes) -> None:
    """Check each value alone, by its declaration, except those of several sizes."""
    for name, option in config.declared().items():
        value = getattr(config, name)
        if value is None and option.takes_none:
            continue
        if option.is_switch and not isinstance(value, bool):
            raise TypeError(f"{name} must be true or false, not {value!r}")
        if option.choices:
            for each in value if option.many else (value,):
                check_choice(name, each, option.choices)
        elif option.parse is int and not option.many:
            check_size(name, value, *option.span)
    if len(set(config.kernels)) != len(config.kernels):
        raise ValueError(f"kernels={config.kernels} names one twice; name it once")


def check_quantization(config: GraphSizes) -> None:
    kind, group, exclude = config.quantization, config.quantization_group_size, config.quantization_exclude
    only_int4 = {"quantization_group_size": group, "quantization_zero_point": config.quantization_zero_point or None}
    for name, value in (only_int4 | {"quantization_exclude": exclude}).items():
        if kind is None and value is not None:
            raise ValueError(
                f"{name}={value!r} needs quantized weights, and quantization is left out; leave it out too"
            )
    if kind == "checkpoint" and exclude is not None:
        raise ValueError(
            f"quantization_exclude={exclude!r} chooses weights to round, and quantization='checkpoint' keeps codes as they are; leave "
            f"out one of them"
        )
    for name, value in only_int4.items():
        if value is not None and kind != "int4":
            raise ValueError(f"{name}={value!r} needs quantization='int4', not {kind!r}; leave out one of them")
    if config.activations not in known.ACTIVATIONS:
        return
    if config.target in known.HLO_TARGETS:
        raise ValueError(
            f"activations={config.activations!r} needs target='cpu' or 'eager', and target={config.target!r} has no product of whole "
            f"numbers; leave it out"
        )
    if kind == "fp8":
        raise ValueError(
            f"activations={config.activations!r} meets weights of int8 or int4, and quantization='fp8' makes none; use "
            f"quantization='int8' or 'int4', or leave activations out"
        )


def check_types(config: GraphSizes) -> None:
    """Check codes, kernels and log-probabilities with the target and with each other."""
    target = config.target
    if config.kernels and target not in known.KERNEL_TARGETS:
        raise ValueError(
            f"kernels={config.kernels} run on {', '.join(known.KERNEL_TARGETS[1:])}, and target={target!r} has none; leave kernels out"
        )
    attention = tuple(name for name in config.kernels if name.startswith("attention"))
    if config.kv_cache_dtype is not None and attention:
        raise ValueError(
            f"kv_cache_dtype={config.kv_cache_dtype!r} keeps codes, and kernels={attention} read no codes; leave out one of them"
        )
    if config.top_logprobs is not None and not config.on_device_sampling:
        raise ValueError(
            f"top_logprobs={config.top_logprobs} describes tokens that the graphs choose, and with on_device_sampling=False the host "
            f"chooses them, from all logits; leave one of them out"
        )


def check_blocks(config: GraphSizes) -> None:
    """Check that blocks have a usable size, and that the cache and a request are whole blocks."""
    block, tokens, length = config.kv_block_size, config.kv_cache_tokens, config.sequence_length
    if block is None:
        if tokens is not None:
            raise ValueError(
                f"kv_cache_tokens={tokens} needs a cache of blocks, and kv_block_size is left out; give both, as kv_block_size=128"
            )
        return
    if block < known.SMALLEST_BLOCK or block & (block - 1):
        raise ValueError(
            f"kv_block_size={block} must be a power of two of at least {known.SMALLEST_BLOCK}, as 128; choose another"
        )
    if length % block:
        raise ValueError(
            f"sequence_length={length} is not a multiple of kv_block_size={block}; make it {-(-length // block) * block}, "
            f"or choose smaller blocks"
        )
    if tokens is None:
        return
    if tokens < length or tokens % block:
        raise ValueError(
            f"kv_cache_tokens={tokens} must be a multiple of kv_block_size={block} and hold one request of "
            f"sequence_length={length} at least; make it {max(length, -(-tokens // block) * block)}"
        )


def check_cached_tokens(config: GraphSizes) -> None:
    """Raise ValueError where slots hold more tokens than graphs count."""
    rows, length = config.batch_size, config.sequence_length
    if rows * length > known.LARGEST_SIZE:
        raise ValueError(
            f"batch_size={rows} requests of sequence_length={length} tokens are a KV cache of {rows * length:,} tokens, and graphs count to "
            f"{known.LARGEST_SIZE:,}; lower one of them"
        )


def check_sizes(config: GraphSizes) -> None:
    rows, chunk, length = config.batch_size, config.prefill_chunk_size, config.sequence_length
    if chunk > length:
        raise ValueError(
            f"prefill_chunk_size={chunk} is larger than sequence_length={length}; lower prefill_chunk_size"
        )
    if config.step_capacity > length and config.kv_block_size is None:
        check_cached_tokens(config)
        raise ValueError(
            f"a step of batch_size + ctx_batch_size * prefill_chunk_size = {rows} + {config.ctx_batch_size} * {chunk} = "
            f"{config.step_capacity} tokens exceeds sequence_length={length}: padding would find no cache row of its own; lower "
            f"prefill_chunk_size or raise sequence_length"
        )
    if config.ctx_batch_size > rows:
        raise ValueError(
            f"ctx_batch_size={config.ctx_batch_size} is larger than batch_size={rows}: each prompt of a chunk step needs a slot of its "
            f"own; lower ctx_batch_size"
        )
    if config.mixed_step and rows == 1:
        raise ValueError(
            "mixed_step=True needs batch_size=2 or more, not batch_size=1: the only slot cannot decode while it takes a "
            "prompt; leave mixed_step out or raise batch_size"
        )
    if config.float32_reduce and config.tensor_parallel_size == 1:
        raise ValueError(
            "float32_reduce=True needs tensor_parallel_size=2 or more, not tensor_parallel_size=1, which has no partial sums; leave it out"
        )


def check_buckets(config: GraphSizes) -> None:
    """Check that buckets of chunks and contexts lie below and up to the sizes that they divide."""
    chunks, contexts, length = config.prefill_chunk_buckets, config.context_buckets, config.sequence_length
    if chunks and chunks[-1] >= config.prefill_chunk_size:
        raise ValueError(
            f"prefill_chunk_buckets={chunks} must be smaller than prefill_chunk_size={config.prefill_chunk_size}; leave out the larger ones"
        )
    if contexts[-1:] != (length,):
        raise ValueError(
            f"context_buckets={contexts} must end with sequence_length={length}; add {length} as the last bucket and nothing above it"
        )
    uneven = [bucket for bucket in contexts if bucket % (config.kv_block_size or 1)]
    if uneven:
        raise ValueError(
            f"context_buckets={contexts} must be multiples of kv_block_size={config.kv_block_size}; change {uneven}"
        )
