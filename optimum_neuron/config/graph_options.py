# SPDX-License-Identifier: Apache-2.0
"""Options that are fixed when graphs are compiled, and the values that they may have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .option import LARGEST_SIZE as LARGEST_SIZE
from .option import REPEATED, SIZES, WORDS, Options, option, read_dtype


TASKS = ("text-generation",)
NEURON_TARGETS = ("inf2", "trn1", "trn2", "trn3")
# Their graphs are lowered to HLO: hlo runs that on this CPU, the others compile it for the device.
HLO_TARGETS = ("hlo", *NEURON_TARGETS)
TARGETS = ("auto", "cpu", "eager", *HLO_TARGETS)
# Kernels of the SDK by name, and targets that run them: they need a Trainium 2 or later; on hlo their references run.
KERNELS = ("attention_cte", "moe_tkg")
KERNEL_TARGETS = ("auto", "hlo", "trn2", "trn3")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("int8", "fp8")
# Codes that activations are rounded to. "auto" takes the faster choice on this machine, "none" keeps activations as they are.
ACTIVATIONS = ("int8",)
ACTIVATION_CHOICES = ("auto", "none", *ACTIVATIONS)
# Codes that an export rounds weights to, or "checkpoint" for a quantized checkpoint's own.
QUANTIZATIONS = ("int8", "int4", "fp8", "checkpoint")
INT4_GROUP_SIZES = (32, 64, 128)
# Attention kernels take this many columns at a time, and a block is a multiple of it.
SMALLEST_BLOCK = 64
# The most that servers of OpenAI's API return.
MOST_LOGPROBS = 20


# Stands for a size that follows from the others and is filled in at construction.
DERIVED: Any = None


class DefaultSize(int):
    """A size that was not asked for."""


def _count(default: Any, text: str, group: str, metavar: str = "TOKENS", **settings: Any) -> Any:
    return option(default, text, group, parse=int, metavar=metavar, **settings)


def _switch(group: str, text: str) -> Any:
    return option(False, text, group, is_switch=True)


@dataclass(frozen=True, kw_only=True)
class GraphOptions(Options):
    """The type, default and help of each option. NeuronConfig adds checks and derived values."""

    batch_size: int = _count(1, "requests that are served at the same time: rows of a decode step", "basic", "ROWS")
    sequence_length: int = _count(
        DefaultSize(1024),
        "prompt and answer of one request together; an export lowers the default to the positions of its model",
        "basic",
    )
    kv_block_size: int | None = _count(
        None,
        "make the KV cache of blocks of this size, which requests take as they grow; a power of two from 64 on, such as 128 (default: a "
        "slot of `sequence_length` for each row)",
        "cache",
    )
    kv_cache_tokens: int | None = _count(
        None,
        "tokens that all requests together hold in blocks, at most; `batch_size` then only counts rows (default: `batch_size` times "
        "`sequence_length`)",
        "cache",
    )
    state_snapshots: int | None = _count(
        None,
        "for a model with recurrences, short convolutions or compressed keys, copies of a slot's state that are kept, so that prompts with "
        "a common start share it; each takes the memory of one slot's state; 0 turns this off (default: twice `batch_size`; for Neuron 0)",
        "cache",
        "COUNT",
        span=(0, LARGEST_SIZE),
    )
    state_snapshot_interval: int | None = _count(
        None,
        "tokens of a long prompt after which its state is kept again, where a step ends; in vLLM's blocks a multiple of the block "
        "(default: it is kept where the prompt ends, and where it parts from others)",
        "cache",
    )
    prefill_chunk_size: int = _count(
        DERIVED,
        "prompt tokens that one step takes in (default: the largest power of two up to 512 that the other sizes allow)",
        "basic",
    )
    prefill_chunk_buckets: tuple[int, ...] = _count(
        (),
        "smaller chunk sizes, ascending, compiled as well so that a short prompt costs less, as in 32,128 or 32 128 (default: none)",
        "prompts",
        many=SIZES,
    )
    ctx_batch_size: int = _count(
        1,
        "chunk rows of a step: short prompts that one step takes in together, or rows that a long one fills",
        "prompts",
        "ROWS",
    )
    mixed_step: bool = option(
        DERIVED,
        "compile graphs that advance a prompt and decode in the same step, so that decoding never waits (default: if `batch_size` is above 1)",
        "prompts",
        is_switch=True,
        off="compile no graphs that decode and take in a prompt in the same step: prompts and decoding then take turns (default: compile "
        "them if `batch_size` is above 1)",
    )
    context_buckets: tuple[int, ...] = _count(
        DERIVED,
        "cache lengths that attention reads, ascending up to `sequence_length` (default: for Neuron the sequence length and its quarters "
        "down to 256; for the host the sequence length alone, where attention stops at each token)",
        "prompts",
        many=SIZES,
    )
    dtype: str = option(
        "auto",
        "type of weights, activations and KV cache; auto takes the checkpoint's",
        "basic",
        parse=read_dtype,
        choices=DTYPES,
    )
    kv_cache_dtype: str | None = option(
        None,
        "keep keys and values as codes of 8 bits (fp8 is e4m3), with a scale for each token and head: half of bfloat16's bytes, and 4 for "
        "each scale; other state stays as it is (default: they have the type of activations)",
        "cache",
        choices=KV_CACHE_DTYPES,
    )
    on_device_sampling: bool = option(
        True,
        "choose tokens in the graphs, which otherwise return logits only",
        "sampling",
        is_switch=True,
        off="return logits only; the host chooses the tokens",
    )
    output_logits: bool = _switch(
        "sampling",
        "return the logits of every row with the tokens: for logits processors and scores (default: if the checkpoint's "
        "generation_config.json needs them)",
    )
    prompt_logits: bool = _switch(
        "sampling",
        "compile one more graph of each chunk size, which returns the logits of all tokens of a prompt: for model(input_ids), the loss of "
        "labels, and vLLM's prompt_logprobs",
    )
    top_logprobs: int | None = _count(
        None,
        f"return the log-probability of each chosen token, and of the COUNT most likely ones, 0 to {MOST_LOGPROBS}",
        "sampling",
        "COUNT",
        span=(0, MOST_LOGPROBS),
    )
    quantization: str | None = option(
        None,
        "round the weights of linear layers: int8 and fp8 halve bfloat16's size, int4 takes about a quarter; checkpoint keeps all codes of "
        "a quantized checkpoint to the bit (default: plain weights and codes stay as they are, except blocks of GGUF that no code and "
        "scale stands for)",
        "basic",
        choices=QUANTIZATIONS,
    )
    quantization_group_size: int | None = _count(
        None,
        f"inputs that share a scale in int4: {', '.join(map(str, INT4_GROUP_SIZES))}; fewer are more exact, and larger (default: "
        f"{INT4_GROUP_SIZES[0]})",
        "weights",
        "INPUTS",
        choices=INT4_GROUP_SIZES,
    )
    quantization_zero_point: bool = _switch(
        "weights",
        "in int4, spread the codes of a group between its least and its largest weight, and not around zero: more exact, and larger",
    )
    quantization_exclude: tuple[str, ...] | None = option(
        None,
        "linear layers that stay as they are, by name, as in 'model.layers.0.*'; give the option again for another pattern (default: "
        "routers, and layers that steer a recurrence or select keys; in int4, the head is int8)",
        "weights",
        metavar="PATTERN",
        many=REPEATED,
    )
    activations: str | None = option(
        "auto",
        "round activations to int8 where they meet weights of int8 or int4, with a scale for each token and 64 inputs, which is less exact "
        "and needs the target cpu or eager: auto rounds them for the host CPU if it computes that faster, none keeps them",
        "weights",
        choices=ACTIVATION_CHOICES,
    )
    tensor_parallel_size: int = _count(
        1,
        "cores that share one copy of the model, as many as a host connects: inf2 1, 2, 4, 8, 24; trn1 1, 2, 8, 16, 32; trn2 and trn3 1, 2, "
        "4, 8, 16, 32, 64",
        "devices",
        "DEVICES",
    )
    float32_reduce: bool = _switch(
        "devices",
        "have devices add their partial sums in float32: one rounding less per layer, twice the bytes between devices",
    )
    long_frequencies: bool = _switch(
        "devices",
        "with a LongRoPE model, use the rotary frequencies of long texts for all texts, as vLLM does (default: those of short texts, which "
        "limit the sequence length)",
    )
    kernels: tuple[str, ...] = option(
        (),
        f"kernels of the SDK in place of operators, for {', '.join(KERNEL_TARGETS[1:])}: {', '.join(KERNELS)}; none of them has run on a "
        "device yet (default: none)",
        "devices",
        choices=KERNELS,
        metavar="NAME",
        many=WORDS,
    )
    target: str = option(
        "auto",
        "where the graphs run: the host CPU, compiled (cpu) or not (eager, for debugging), or a Neuron instance type; hlo runs its graphs on "
        "the CPU; auto takes what this machine has",
        "basic",
        choices=TARGETS,
    )

    @property
    def kept_states(self) -> dict[str, int | None]:
        """The options of copies of slots' state, by name."""
        return {name: getattr(self, name) for name in ("state_snapshots", "state_snapshot_interval")}

    @property
    def state_places(self) -> int:
        """Copies of a slot's state that are kept at the same time, for a model that has any."""
        if self.state_snapshots is not None:
            return self.state_snapshots
        return 0 if self.target in HLO_TARGETS else 2 * self.batch_size

    def check_kept_states(self) -> None:
        """Raise ValueError where state is to be kept, and there is no place for it."""
        if self.state_snapshot_interval is not None and not self.state_places:
            asked = self.state_snapshots == 0
            why = "; leave out one" if asked else f", the default of target={self.target!r}; give both"
            raise ValueError(
                f"state_snapshot_interval={self.state_snapshot_interval} has nowhere to keep state with state_snapshots=0{why}"
            )
