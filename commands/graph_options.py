# SPDX-License-Identifier: Apache-2.0
"""Options that make a NeuronConfig, of an export and of the commands that estimate or check one."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from typing import Any

from optimum_neuron.cli import add_option, size_list
from optimum_neuron.config import (
    ACTIVATION_CHOICES,
    DTYPES,
    KERNEL_TARGETS,
    KERNELS,
    KV_CACHE_DTYPES,
    MOST_LOGPROBS,
    TARGETS,
    NeuronConfig,
)
from optimum_neuron.options import INT4_GROUP_SIZES, QUANTIZATIONS, dtype


# Settings of argparse by flag, and the help. Defaults are NeuronConfig's.
_Options = dict[str, tuple[dict[str, Any], str]]
_ROWS: dict[str, Any] = {"type": int, "metavar": "ROWS"}
_TOKENS, _COUNT = _ROWS | {"metavar": "TOKENS"}, _ROWS | {"metavar": "COUNT"}
_SIZES: dict[str, Any] = {"type": size_list, "nargs": "+", "metavar": "TOKENS"}
_ON: dict[str, Any] = {"action": "store_true"}

_BASIC: _Options = {
    "--target": (
        {"choices": TARGETS},
        "where the graphs run: the host CPU, compiled (cpu) or not (eager, for debugging), or a Neuron instance type; hlo runs its graphs "
        "on the CPU; auto takes what this machine has",
    ),
    "--batch-size": (_ROWS, "requests that are served at the same time"),
    "--sequence-length": (_TOKENS, "prompt and answer of one request together"),
    "--prefill-chunk-size": (
        _TOKENS,
        "prompt tokens that one step takes in (default: the largest power of two up to 512 that the other sizes allow)",
    ),
    "--dtype": (
        {"type": dtype, "choices": DTYPES},
        "type of weights, activations and KV cache; auto is the checkpoint's",
    ),
}
_KIND_OF_CODES: _Options = {
    "--quantization": (
        {"choices": QUANTIZATIONS},
        "round the weights of linear layers: int8 and fp8 halve bfloat16's size, int4 takes about a quarter; checkpoint keeps the codes of a "
        "quantized checkpoint as they are (default: plain weights stay as they are, and so do codes)",
    ),
}
_PROMPTS: _Options = {
    "--prefill-chunk-buckets": (
        _SIZES,
        "smaller chunk sizes, compiled as well so that a short prompt costs less, as in 32,128 or 32 128 (default: none)",
    ),
    "--ctx-batch-size": (
        _ROWS,
        "chunk rows of a step: short prompts that one step takes in together, or rows that a long one fills",
    ),
    "--no-mixed-step": (
        {"dest": "mixed_step", "action": "store_false"},
        "compile no graphs that decode and take in a prompt in the same step: prompts and decoding then take turns (default: compile them if "
        "the batch size is above 1)",
    ),
    "--context-buckets": (
        _SIZES,
        "cache lengths that attention reads, up to the sequence length (default: for Neuron the sequence length and its quarters down to 256; "
        "for the host the sequence length alone, where attention stops at each token)",
    ),
}
_CACHE: _Options = {
    "--kv-block-size": (
        _TOKENS,
        "make the KV cache of blocks of so many tokens, which requests take as they grow; a power of two from 64 on, as 128 (default: a slot "
        "of --sequence-length for each row)",
    ),
    "--kv-cache-tokens": (
        _TOKENS,
        "tokens that all requests together hold in blocks, at most; --batch-size then only counts rows (default: --batch-size times "
        "--sequence-length)",
    ),
    "--state-snapshots": (
        _COUNT,
        "of a model with recurrences, short convolutions or compressed keys, copies of a slot's state that are kept, so that prompts that "
        "start alike share it; 0 turns this off (default: twice --batch-size; for Neuron 0)",
    ),
    "--state-snapshot-interval": (
        _TOKENS,
        "tokens of a long prompt after which its state is kept again, where a step ends (default: it is kept where the prompt ends, and where "
        "it parts from others)",
    ),
}
_CODES_OF_CACHE: _Options = {
    "--kv-cache-dtype": (
        {"choices": KV_CACHE_DTYPES},
        "keep keys and values as codes of 8 bits, with a scale for each token and head (default: they have the type of activations)",
    ),
}
_CODES: _Options = {
    "--quantization-group-size": (
        {"type": int, "choices": INT4_GROUP_SIZES, "metavar": "INPUTS"},
        f"inputs that share a scale in int4: {', '.join(map(str, INT4_GROUP_SIZES))}; fewer are more exact, and larger (default: "
        f"{INT4_GROUP_SIZES[0]})",
    ),
    "--quantization-zero-point": (
        _ON,
        "in int4, spread the codes of a group between its least and its largest weight, and not around zero: more exact, and larger",
    ),
    "--quantization-exclude": (
        {"action": "append", "metavar": "PATTERN"},
        "linear layers that stay as they are, by name, as in 'model.layers.0.*'; give the option again for another pattern (default: routers, "
        "and what steers a recurrence or selects keys; in int4, the head is int8)",
    ),
}
_ACTIVATIONS: _Options = {
    "--activations": (
        {"choices": ACTIVATION_CHOICES},
        "round activations to int8 where they meet weights of int8 or int4, which is less exact: auto rounds them for the host CPU if it "
        "computes that faster, none keeps them",
    ),
}
_SAMPLING: _Options = {
    "--no-on-device-sampling": (
        {"dest": "on_device_sampling", "action": "store_false"},
        "return logits only; the host chooses the tokens",
    ),
    "--output-logits": (
        _ON,
        "return the logits of every row with the tokens: for logits processors and scores (default: if the checkpoint's "
        "generation_config.json needs them)",
    ),
    "--prompt-logits": (
        _ON,
        "compile one more graph of each chunk size, which returns the logits of all tokens of a prompt: for model(input_ids), the loss of "
        "labels, and vLLM's prompt_logprobs",
    ),
    "--top-logprobs": (
        _COUNT,
        f"return the log-probability of each chosen token, and of the COUNT most likely ones, 0 to {MOST_LOGPROBS}",
    ),
}
_DEVICES: _Options = {
    "--tensor-parallel-size": (
        {"type": int, "metavar": "DEVICES"},
        "cores that share one copy of the model, as many as a host connects: inf2 1, 2, 4, 8, 24; trn1 1, 2, 8, 16, 32; trn2 and trn3 1, 2, 4, "
        "8, 16, 32, 64",
    ),
    "--float32-reduce": (
        _ON,
        "have devices add their partial sums in float32: one rounding less per layer, twice the bytes between devices",
    ),
    "--long-frequencies": (
        _ON,
        "with a LongRoPE model, use the rotary frequencies of long texts for all texts, as vLLM does (default: those of short texts, which limit "
        "the sequence length)",
    ),
    "--kernels": (
        {"nargs": "+", "choices": KERNELS, "metavar": "NAME"},
        f"kernels of the SDK in place of operators, for {', '.join(KERNEL_TARGETS[1:])}: {', '.join(KERNELS)}; none of them has run on a "
        "device yet (default: none)",
    ),
}


def add_graph_options(parser: ArgumentParser, basics: Any = None) -> Any:
    """Adds all options of a NeuronConfig, those that most exports need first.

    Args:
        basics: the group of the first ones (default: a new one).

    Returns:
        The group of devices.
    """
    _add(parser.add_argument_group("basic options") if basics is None else basics, _BASIC | _KIND_OF_CODES)
    _add(parser.add_argument_group("prompts", "How a step takes them in, in tokens."), _PROMPTS)
    _add(parser.add_argument_group("cache", "Keys, values and states of requests."), _CACHE | _CODES_OF_CACHE)
    _add(parser.add_argument_group("weights and activations"), _CODES | _ACTIVATIONS)
    _add(parser.add_argument_group("sampling and logits", "Graphs choose the next token themselves."), _SAMPLING)
    devices = parser.add_argument_group("devices")
    _add(devices, _DEVICES)
    return devices


def add_size_options(group: Any) -> None:
    """Adds the sizes of a NeuronConfig, None where they are not given: an artifact has its own."""
    options = _BASIC | _PROMPTS | _CACHE | _SAMPLING
    _add(group, {flag: options[flag] for flag in options if flag != "--target"}, unset=True)


def add_device_options(group: Any) -> None:
    """Adds what is chosen of devices, None where it is not given."""
    _add(group, _DEVICES, unset=True)


def add_quantization_options(parser: ArgumentParser) -> None:
    """Adds the options of the form of weights, and of keys and values, None where they are not given."""
    group = parser.add_argument_group("quantization", "Of weights, and of keys and values.")
    _add(group, _KIND_OF_CODES | _CODES | _CODES_OF_CACHE, unset=True)


def _add(group: Any, options: _Options, *, unset: bool = False) -> None:
    for flag, (settings, text) in options.items():
        default = getattr(NeuronConfig, settings.get("dest", flag[2:].replace("-", "_")))
        if unset and not isinstance(default, bool | tuple | None):
            text += f" (default: {default})"
        add_option(group, flag, default=None if unset or default == () else default, help=text, **settings)


def config_options(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return those arguments of a command that a NeuronConfig has."""
    options = {name: args[name] for name in NeuronConfig.option_names()}
    for name in ("prefill_chunk_buckets", "context_buckets", "kernels"):
        if options[name] is None:
            options.pop(name)
        elif name != "kernels":
            options[name] = tuple(size for sizes in options[name] for size in sizes)
    return options
