# SPDX-License-Identifier: Apache-2.0
"""The options of which a NeuronConfig is made: of an export, and of the commands that tell of one before it is done."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from typing import Any

from optimum_neuron.cli import add_option, size_list
from optimum_neuron.config import (
    ACTIVATIONS,
    DTYPES,
    KERNEL_TARGETS,
    KERNELS,
    KV_CACHE_DTYPES,
    MOST_LOGPROBS,
    TARGETS,
    NeuronConfig,
)
from optimum_neuron.option_checks import INT4_GROUP_SIZES, QUANTIZATIONS


def add_graph_options(parser: ArgumentParser, basics: Any = None) -> Any:
    """Options that make a NeuronConfig, those that most exports need first; shared by the commands that tell of an export before it is done.

    Args:
        basics: the group of the first ones (default: a new one).

    Returns:
        The group of devices.
    """
    _add_basic_options(parser.add_argument_group("basic options") if basics is None else basics)
    _add_prompt_options(parser.add_argument_group("prompts", "How a step takes them in, in tokens."))
    cache = parser.add_argument_group("cache", "Keys, values and states of requests.")
    _add_cache_options(cache)
    group = parser.add_argument_group("weights and activations")
    _add_rounding_options(group, cache)
    add_option(
        group,
        "--activations",
        choices=ACTIVATIONS,
        help="round activations to int8, too, where they meet weights of int8 or int4: faster, and less exact, on the host CPU (default: they "
        "stay as they are)",
    )
    _add_sampling_options(parser.add_argument_group("sampling and logits", "Graphs choose the next token themselves."))
    devices = parser.add_argument_group("devices")
    _add_device_options(devices)
    return devices


def _add_basic_options(group: Any) -> None:
    add_option(
        group,
        "--target",
        choices=TARGETS,
        default=NeuronConfig.target,
        help="where the graphs run: the host CPU, compiled (cpu) or not (eager, for debugging), or a Neuron instance "
        "type; hlo runs its graphs on the CPU; auto takes what this machine has",
    )
    add_option(
        group,
        "--batch-size",
        type=int,
        default=NeuronConfig.batch_size,
        metavar="ROWS",
        help="requests that are served at the same time",
    )
    add_option(
        group,
        "--sequence-length",
        type=int,
        default=NeuronConfig.sequence_length,
        metavar="TOKENS",
        help="prompt and answer of one request together",
    )
    add_option(
        group,
        "--prefill-chunk-size",
        type=int,
        default=NeuronConfig.prefill_chunk_size,
        metavar="TOKENS",
        help="prompt tokens that one step takes in (default: the largest power of two up to 512 that the other sizes allow)",
    )
    add_option(
        group,
        "--dtype",
        choices=DTYPES,
        default=NeuronConfig.dtype,
        help="type of weights, activations and KV cache; auto is the checkpoint's",
    )
    _add_quantization_option(group)


def _add_cache_options(group: Any) -> None:
    add_option(
        group,
        "--kv-block-size",
        type=int,
        metavar="TOKENS",
        help="make the KV cache of blocks of so many tokens, which requests take as they grow; a power of two from 64 on, as 128 "
        "(default: a slot of --sequence-length for each row)",
    )
    add_option(
        group,
        "--kv-cache-tokens",
        type=int,
        metavar="TOKENS",
        help="tokens that all requests together hold in blocks, at most; --batch-size then only counts rows "
        "(default: --batch-size times --sequence-length)",
    )
    add_option(
        group,
        "--state-snapshots",
        type=int,
        metavar="COUNT",
        help="of a model with recurrences, short convolutions or compressed keys, copies of a slot's state that are kept, so that "
        "prompts that start alike share it; 0 turns this off (default: twice --batch-size; for Neuron 0)",
    )
    add_option(
        group,
        "--state-snapshot-interval",
        type=int,
        metavar="TOKENS",
        help="tokens of a long prompt after which its state is kept again, where a step ends (default: it is kept where the "
        "prompt ends, and where it parts from others)",
    )


def _add_prompt_options(group: Any) -> None:
    add_option(
        group,
        "--prefill-chunk-buckets",
        type=size_list,
        nargs="+",
        metavar="TOKENS",
        help="smaller chunk sizes, compiled as well so that a short prompt costs less, as in 32,128 or 32 128 (default: none)",
    )
    add_option(
        group,
        "--ctx-batch-size",
        type=int,
        default=NeuronConfig.ctx_batch_size,
        metavar="ROWS",
        help="chunk rows of a step: short prompts that one step takes in together, or rows that a long one fills",
    )
    add_option(
        group,
        "--no-mixed-step",
        dest="mixed_step",
        action="store_false",
        default=NeuronConfig.mixed_step,
        help="compile no graphs that decode and take in a prompt in the same step: prompts and decoding then take turns "
        "(default: compile them if the batch size is above 1)",
    )
    add_option(
        group,
        "--context-buckets",
        type=size_list,
        nargs="+",
        metavar="TOKENS",
        help="cache lengths that attention reads, up to the sequence length (default: for Neuron the sequence length and its "
        "quarters down to 256; for the host the sequence length alone, where attention stops at each token)",
    )


def _add_sampling_options(group: Any) -> None:
    add_option(
        group,
        "--no-on-device-sampling",
        dest="on_device_sampling",
        action="store_false",
        default=NeuronConfig.on_device_sampling,
        help="return logits only; the host chooses the tokens",
    )
    add_option(
        group,
        "--output-logits",
        action="store_true",
        default=NeuronConfig.output_logits,
        help="return the logits of every row beside the tokens: for logits processors and scores",
    )
    add_option(
        group,
        "--prompt-logits",
        action="store_true",
        default=NeuronConfig.prompt_logits,
        help="compile one more graph of each chunk size, which returns the logits of all tokens of a prompt: for model(input_ids), "
        "the loss of labels, and vLLM's prompt_logprobs",
    )
    add_option(
        group,
        "--top-logprobs",
        type=int,
        default=NeuronConfig.top_logprobs,
        metavar="COUNT",
        help=f"return the log-probability of each chosen token, and of the COUNT most likely ones, 0 to {MOST_LOGPROBS}",
    )


def add_quantization_options(parser: ArgumentParser) -> None:
    """Options of the form of weights, and of keys and values; for the commands that have no others of an export."""
    group = parser.add_argument_group("quantization", "Of weights, and of keys and values.")
    _add_quantization_option(group)
    _add_rounding_options(group, group)


def _add_quantization_option(group: Any) -> None:
    add_option(
        group,
        "--quantization",
        choices=QUANTIZATIONS,
        help="round the weights of linear layers: int8 and fp8 halve bfloat16's size, int4 takes about a quarter; checkpoint keeps "
        "the codes of a quantized checkpoint as they are (default: plain weights stay as they are, and so do codes)",
    )


def _add_rounding_options(group: Any, cache: Any) -> None:
    add_option(
        group,
        "--quantization-group-size",
        type=int,
        choices=INT4_GROUP_SIZES,
        metavar="INPUTS",
        help=f"inputs that share a scale in int4: {', '.join(map(str, INT4_GROUP_SIZES))}; fewer are more exact, and larger "
        f"(default: {INT4_GROUP_SIZES[0]})",
    )
    add_option(
        group,
        "--quantization-zero-point",
        action="store_true",
        help="in int4, spread the codes of a group between its least and its largest weight, and not around zero: more exact, and larger",
    )
    group.add_argument(
        "--quantization-exclude",
        action="append",
        metavar="PATTERN",
        help="linear layers that stay as they are, by name, as in 'model.layers.0.*'; give the option again for another pattern "
        "(default: routers, and what steers a recurrence or selects keys; in int4, the head is int8)",
    )
    add_option(
        cache,
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        help="keep keys and values as codes of 8 bits, with a scale for each token and head (default: they are of the type of activations)",
    )


def _add_device_options(group: Any) -> None:
    add_option(
        group,
        "--tensor-parallel-size",
        type=int,
        default=NeuronConfig.tensor_parallel_size,
        metavar="DEVICES",
        help="cores that share one copy of the model, as many as a host connects: inf2 1, 2, 4, 8, 24; trn1 1, 2, 8, 16, 32; "
        "trn2 and trn3 1, 2, 4, 8, 16, 32, 64",
    )
    add_option(
        group,
        "--float32-reduce",
        action="store_true",
        help="have devices add their partial sums in float32: one rounding less per layer, twice the bytes between devices",
    )
    add_option(
        group,
        "--long-frequencies",
        action="store_true",
        help="give all texts of a LongRoPE model the rotary frequencies of long ones, as vLLM does (default: those of short ones, "
        "which bound the sequence length)",
    )
    add_option(
        group,
        "--kernels",
        nargs="+",
        choices=KERNELS,
        metavar="NAME",
        help=f"kernels of the SDK in place of operators, for {', '.join(KERNEL_TARGETS[1:])}: {', '.join(KERNELS)}; none of them "
        "has run on a device yet (default: none)",
    )


def config_options(args: Mapping[str, Any]) -> dict[str, Any]:
    """What of a command's arguments is a NeuronConfig's."""
    options = {name: args[name] for name in NeuronConfig.option_names()}
    for name in ("prefill_chunk_buckets", "context_buckets", "kernels"):
        if options[name] is None:
            options.pop(name)
        elif name != "kernels":
            options[name] = tuple(size for sizes in options[name] for size in sizes)
    return options
