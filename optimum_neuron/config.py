# SPDX-License-Identifier: Apache-2.0
"""NeuronConfig: the sizes and options fixed when graphs are compiled. Knows nothing of files, models or devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from . import options as check


NEURON_TARGETS = ("inf2", "trn1", "trn2", "trn3")
# Their graphs are lowered to HLO: hlo runs that on this CPU, the others compile it for the device.
HLO_TARGETS = ("hlo", *NEURON_TARGETS)
TARGETS = ("auto", "cpu", "eager", *HLO_TARGETS)
# Kernels of the SDK by name, and where they may stand for operators: they need a Trainium 2 or later; on hlo their references run.
KERNELS = ("attention_cte", "attention_block_tkg", "moe_tkg")
KERNEL_TARGETS = ("auto", "hlo", "trn2", "trn3")
# Their compiler takes no number of 8 bits as the Open Compute Project has it (e4m3); error code EVRF051 of the SDK.
TARGETS_WITHOUT_FP8 = ("inf2", "trn1")
# Codes that keys and values are rounded to.
KV_CACHE_DTYPES = ("int8", "fp8")
# Codes that activations are rounded to before they meet quantized weights.
ACTIVATIONS = ("int8",)
# Choices for them: "auto" stands for the faster of the others on the machine that exports, "none" for activations as they are.
ACTIVATION_CHOICES = ("auto", "none", *ACTIVATIONS)
DTYPES = ("auto", "float32", "bfloat16", "float16")
# Targets whose kernels take the states of recurrences on token by token; the others compute in blocks.
WALKING_TARGETS: tuple[str, ...] = ("cpu",)
# Tokens of a block of a recurrence, at most: within one, work grows with its square; between two, the state is read and written.
LARGEST_SCAN_BLOCK = 64

# As many as servers of OpenAI's API tell of.
MOST_LOGPROBS = 20
DEFAULT_CHUNK_LIMIT = 512
DEFAULT_SMALLEST_CONTEXT = 256
# Blocks that attend with all rows' queries, of so many that attend in place: each costs a step as much memory traffic as one of
# these and, of 128 rows, 128 times its arithmetic. On trn2 all of them together are 3% of what a decode step of Llama-3.1-8B reads.
BLOCKS_PER_SHARED = 32
# Stands for a size that follows from the others and is filled in at construction.
_DERIVED: Any = None


class _Followed(tuple[int, ...]):
    """Sizes that nobody asked for: where `dataclasses.replace` changes what they follow from, they follow again."""

    __slots__ = ()


class _Default(int):
    """A size that was not asked for."""


@dataclass(frozen=True, kw_only=True)
class NeuronConfig:
    """Compile-time facts of an artifact.

    Sizes are in tokens. `prefill_chunk_size`, `mixed_step` and `context_buckets` follow from the other sizes where they
    are left out (None), so that an instance is always complete.

    Args:
        batch_size: rows of a token-generation step, and slots of the KV cache where it has no blocks.
        sequence_length: prompt and generated tokens of one request, at most. An export lowers the default to the positions of its model.
        kv_block_size: the KV cache is blocks of so many tokens, which requests take as they grow: a power of two. Default:
            each row has a slot of `sequence_length` tokens of its own.
        kv_cache_tokens: tokens that all requests hold together, at most; of a cache of blocks. Default: `batch_size` times
            `sequence_length`.
        state_snapshots: of a model that keeps state of all tokens of a slot (recurrences, short convolutions, compressed keys), places
            for copies of it, behind which prompts that start alike go on; each takes what one slot's state takes. 0: they reuse
            nothing. Default: two for each row, as a text parts from others in one place and its prompt ends in another; on Neuron
            targets, where they take device memory, 0.
        state_snapshot_interval: tokens of a long prompt behind which its state is kept again, where a chunk ends anyway. Default: it is
            kept only where the prompt ends, where its rest fits a step, and where it parts from others. In vLLM's blocks all these
            places are borders of blocks.
        prefill_chunk_size: prompt tokens that one chunk step advances. Default: the largest power of two up to 512
            that the sizes allow.
        prefill_chunk_buckets: smaller chunk sizes, ascending, compiled beside `prefill_chunk_size`, so that a short
            prompt costs less. Default: none.
        ctx_batch_size: chunk rows of a step: prompts that one step can advance. A prompt that is longer than a chunk
            may take several rows of one step.
        mixed_step: compile graphs that advance a prompt and decode in the same step, so that decoding never waits.
            Default: where `batch_size` is larger than 1.
        context_buckets: lengths of the cache prefix that attention reads, ascending, the last one being
            `sequence_length`. Default: on Neuron targets `sequence_length` and its quarters down to 256; elsewhere
            `sequence_length` alone, because attention there stops at each token's own position. A default follows the
            target, also where `dataclasses.replace` changes "auto" into what it stands for.
        dtype: type of weights, activations and KV cache; "auto" is the checkpoint's. torch's own types and "bf16", "fp16", "fp32" are
            understood.
        kv_cache_dtype: keys and values are kept as codes of 8 bits, "int8" or "fp8" (e4m3), with a scale for each token and head: half of
            bfloat16's bytes, and 4 for each scale. What else a request keeps (index keys, states of recurrences and convolutions) stays as
            it is. Default: they are of type `dtype`.
        on_device_sampling: the graphs return tokens; otherwise logits only.
        output_logits: the graphs return the logits of every row beside the tokens.
        prompt_logits: beside the other graphs there is one of each chunk size that returns the logits of all its tokens, for who scores
            texts; nothing else runs in it.
        top_logprobs: the graphs can tell the log-probability of the tokens that they choose, and so many of the most likely
            tokens with theirs. Default: they cannot.
        quantization: the weights of linear layers become codes of so many bits: "int8" and "fp8" with a scale for each output, "int4" with
            one for each group of inputs. "checkpoint": a quantized checkpoint's own codes are kept, to the bit, all of them. Default:
            plain weights stay as they are, and so do codes, but for blocks of GGUF that no code and scale stands for.
        quantization_group_size: inputs of a group of int4: 32, 64 or 128. Default: 32.
        quantization_zero_point: values of a group of int4 are spread between its least and its largest, and not around zero.
        quantization_exclude: patterns of names of linear layers that stay as they are, as in `fnmatch`. Default: routers, and what
            decides how fast a recurrence forgets or which keys are selected; of int4, the head becomes int8.
        activations: "int8": layers and experts with weights of int8 or int4 codes multiply with activations rounded to int8. Each token's
            activations have a scale for each block of 64 inputs. This is less exact, and needs the cpu or eager target. "none", or None:
            activations stay as they are. "auto": the cpu target rounds them if that is faster on the CPU that exports, and no other does.
        tensor_parallel_size: devices that share one copy of the model.
        float32_reduce: devices add their partial sums in float32, whatever `dtype` is: one rounding, twice the bytes.
        long_frequencies: of a model whose rotary frequencies change where a text grows long (LongRoPE), all texts get those of long
            ones, as in vLLM. Default: those of short ones, and no text is longer than they are for.
        kernels: of the SDK, which stand for operators of the graphs where layers are of a kind that they compute. Default: none,
            as none of them was run yet.
        target: where the graphs run.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is out of range, or two values contradict each other.
    """

    batch_size: int = 1
    sequence_length: int = _Default(1024)
    kv_block_size: int | None = None
    kv_cache_tokens: int | None = None
    state_snapshots: int | None = None
    state_snapshot_interval: int | None = None
    prefill_chunk_size: int = _DERIVED
    prefill_chunk_buckets: tuple[int, ...] = ()
    ctx_batch_size: int = 1
    mixed_step: bool = _DERIVED
    context_buckets: tuple[int, ...] = _DERIVED
    dtype: str = "auto"
    kv_cache_dtype: str | None = None
    on_device_sampling: bool = True
    output_logits: bool = False
    prompt_logits: bool = False
    top_logprobs: int | None = None
    quantization: str | None = None
    quantization_group_size: int | None = None
    quantization_zero_point: bool = False
    quantization_exclude: tuple[str, ...] | None = None
    activations: str | None = "auto"
    tensor_parallel_size: int = 1
    float32_reduce: bool = False
    long_frequencies: bool = False
    kernels: tuple[str, ...] = ()
    target: str = "auto"

    def __post_init__(self) -> None:
        for name in ("batch_size", "sequence_length", "ctx_batch_size", "tensor_parallel_size"):
            check.size(name, getattr(self, name))
        if self.mixed_step is None:
            object.__setattr__(self, "mixed_step", self.batch_size > 1)
        for name in (
            "mixed_step",
            "on_device_sampling",
            "output_logits",
            "prompt_logits",
            "float32_reduce",
            "long_frequencies",
            "quantization_zero_point",
        ):
            check.flag(name, getattr(self, name))
        self._check_logprobs()
        object.__setattr__(self, "dtype", check.dtype(self.dtype))
        check.choice("dtype", self.dtype, DTYPES)
        check.choice("target", self.target, TARGETS)
        self._check_kernels()
        exclude = check.quantization(
            self.quantization, self.quantization_group_size, self.quantization_zero_point, self.quantization_exclude
        )
        object.__setattr__(self, "quantization_exclude", exclude)
        if self.quantization == "fp8" and self.target in TARGETS_WITHOUT_FP8:
            raise ValueError(
                f"quantization='fp8' needs a type that target={self.target!r} lacks; use quantization='int8', or target='trn2' or later"
            )
        self._check_activations()
        self._check_kv_codes()
        check.blocks(self.kv_block_size, self.kv_cache_tokens, self.sequence_length)
        self._check_snapshots()
        self._complete_sizes()
        self._check_sizes()

    def _check_logprobs(self) -> None:
        count = self.top_logprobs
        if count is None:
            return
        check.count("top_logprobs", count, 0, MOST_LOGPROBS)
        if not self.on_device_sampling:
            raise ValueError(
                f"top_logprobs={count} is of tokens that the graphs choose, and on_device_sampling=False has the host choose "
                f"them, from all logits; leave one of them out"
            )

    def _check_kernels(self) -> None:
        object.__setattr__(self, "kernels", check.names("kernels", self.kernels, KERNELS))
        if self.kernels and self.target not in KERNEL_TARGETS:
            raise ValueError(
                f"kernels={self.kernels} are of {', '.join(KERNEL_TARGETS[1:])}, and target={self.target!r} has none; leave "
                f"kernels out"
            )

    def _check_activations(self) -> None:
        if self.activations is None:
            return
        check.choice("activations", self.activations, ACTIVATION_CHOICES)
        if self.activations == "none" or (self.activations == "auto" and self.target in HLO_TARGETS):
            object.__setattr__(self, "activations", None)
        if self.activations not in ACTIVATIONS:
            return
        if self.target in HLO_TARGETS:
            raise ValueError(
                f"activations={self.activations!r} is of target='cpu' and 'eager', and target={self.target!r} has no product of whole numbers; "
                f"leave it out"
            )
        if self.quantization == "fp8":
            raise ValueError(
                f"activations={self.activations!r} meets weights of int8 or int4, and quantization='fp8' makes none; use "
                f"quantization='int8' or 'int4', or leave activations out"
            )

    def _check_kv_codes(self) -> None:
        kind = self.kv_cache_dtype
        if kind is None:
            return
        check.choice("kv_cache_dtype", kind, KV_CACHE_DTYPES)
        if kind == "fp8" and self.target in TARGETS_WITHOUT_FP8:
            raise ValueError(
                f"kv_cache_dtype='fp8' needs a type that target={self.target!r} lacks; use kv_cache_dtype='int8', or target='trn2' or later"
            )
        kernels = [name for name in self.kernels if name.startswith("attention")]
        if kernels:
            raise ValueError(
                f"kv_cache_dtype={kind!r} keeps codes, and kernels={tuple(kernels)} read keys and values as they are; leave out one of them"
            )

    def _check_snapshots(self) -> None:
        for name, least in (("state_snapshots", 0), ("state_snapshot_interval", 1)):
            count = getattr(self, name)
            if count is None:
                continue
            check.count(name, count, least, check.LARGEST_SIZE)
        if self.state_snapshot_interval is not None and not self.snapshot_places:
            why = (
                "; leave out one"
                if self.state_snapshots == 0
                else f", the default of target={self.target!r}; give both"
            )
            raise ValueError(
                f"state_snapshot_interval={self.state_snapshot_interval} has nowhere to keep state with state_snapshots=0{why}"
            )

    def _complete_sizes(self) -> None:
        if self.prefill_chunk_size is None:
            object.__setattr__(self, "prefill_chunk_size", self._default_chunk_size())
        check.size("prefill_chunk_size", self.prefill_chunk_size)
        object.__setattr__(
            self, "prefill_chunk_buckets", check.sizes("prefill_chunk_buckets", self.prefill_chunk_buckets)
        )
        if self.context_buckets is None or isinstance(self.context_buckets, _Followed):
            buckets: tuple[int, ...] = _Followed(self._default_context_buckets())
        else:
            buckets = check.sizes("context_buckets", self.context_buckets)
        object.__setattr__(self, "context_buckets", buckets)

    def _default_chunk_size(self) -> int:
        beside = 0 if self.kv_block_size else self.batch_size
        room = (self.sequence_length - beside) // self.ctx_batch_size
        if room < 1:
            check.cached_tokens(self.batch_size, self.sequence_length)
            raise ValueError(
                f"batch_size={self.batch_size} and ctx_batch_size={self.ctx_batch_size} leave no room for a prefill "
                f"chunk in sequence_length={self.sequence_length}; raise sequence_length or lower batch_size"
            )
        return 1 << (min(room, DEFAULT_CHUNK_LIMIT).bit_length() - 1)

    def _default_context_buckets(self) -> tuple[int, ...]:
        buckets = [self.sequence_length]
        while self.target in HLO_TARGETS and buckets[0] // 4 >= DEFAULT_SMALLEST_CONTEXT:
            if buckets[0] % (4 * (self.kv_block_size or 1)):
                break
            buckets.insert(0, buckets[0] // 4)
        return tuple(buckets)

    def _check_sizes(self) -> None:
        chunk, length = self.prefill_chunk_size, self.sequence_length
        if chunk > length:
            raise ValueError(
                f"prefill_chunk_size={chunk} is larger than sequence_length={length}; lower prefill_chunk_size"
            )
        tokens = self.step_capacity
        if tokens > length and self.kv_block_size is None:
            check.cached_tokens(self.batch_size, length)
            raise ValueError(
                f"a step of batch_size + ctx_batch_size * prefill_chunk_size = {self.batch_size} + "
                f"{self.ctx_batch_size} * {chunk} = {tokens} tokens exceeds sequence_length={length}: padding would "
                f"find no cache row of its own; lower prefill_chunk_size or raise sequence_length"
            )
        if self.ctx_batch_size > self.batch_size:
            raise ValueError(
                f"ctx_batch_size={self.ctx_batch_size} is larger than batch_size={self.batch_size}: each prompt of a "
                f"chunk step needs a slot of its own; lower ctx_batch_size"
            )
        if self.mixed_step and self.batch_size == 1:
            raise ValueError(
                "mixed_step=True needs batch_size=2 or more, not batch_size=1: the only slot cannot decode while it takes a "
                "prompt; leave mixed_step out or raise batch_size"
            )
        check.chunk_buckets(self.prefill_chunk_buckets, chunk)
        check.context_buckets(self.context_buckets, length, self.kv_block_size)
        if self.float32_reduce and self.tensor_parallel_size == 1:
            raise ValueError(
                "float32_reduce=True needs tensor_parallel_size=2 or more, not tensor_parallel_size=1: one device has no "
                "partial sums; leave it out"
            )

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """All compiled chunk sizes, ascending; the last one is `prefill_chunk_size`."""
        return (*self.prefill_chunk_buckets, self.prefill_chunk_size)

    @property
    def prompt_capacity(self) -> int:
        """Prompt tokens that one run of a graph takes in, at most."""
        return self.ctx_batch_size * self.prefill_chunk_size

    @property
    def step_capacity(self) -> int:
        """Tokens that one run of a graph holds, at most: full chunk rows, and a token of every decode row."""
        return self.batch_size + self.prompt_capacity

    @property
    def scan_block(self) -> int | None:
        """Tokens of a block in which recurrences are computed: a power of two, no more than a chunk has, one for all graphs.

        None where the target walks token by token.
        """
        if self.target in WALKING_TARGETS:
            return None
        return min(LARGEST_SCAN_BLOCK, max(2, 1 << (self.prefill_chunk_size.bit_length() - 1)))

    @property
    def snapshot_places(self) -> int:
        """Copies of a slot's state that are kept at the same time, of a model that has any."""
        if self.state_snapshots is not None:
            return self.state_snapshots
        return 0 if self.target in HLO_TARGETS else 2 * self.batch_size

    @property
    def int4_group_size(self) -> int:
        """Inputs that share a scale, where weights are rounded to int4."""
        return self.quantization_group_size or check.INT4_GROUP_SIZES[0]

    @property
    def block_length(self) -> int:
        """Tokens of a block of the cache; where each row has a slot, a block is that."""
        return self.kv_block_size or self.sequence_length

    @property
    def kv_blocks(self) -> int:
        """Blocks that requests can have together."""
        if self.kv_block_size is None:
            return self.batch_size
        return (self.kv_cache_tokens or self.batch_size * self.sequence_length) // self.kv_block_size

    @property
    def blocks_per_row(self) -> int:
        """Blocks of the longest request."""
        return self.sequence_length // self.block_length

    def blocks_of(self, tokens: int) -> int:
        """Blocks that so many tokens of a row take."""
        return -(-tokens // self.block_length)

    @property
    def trash_blocks(self) -> int:
        """Blocks behind the others, where padding is written: each token of a step has a place of its own there."""
        return self.blocks_of(self.step_capacity)

    @property
    def blocks_in_place(self) -> bool:
        """Whether decode rows attend over blocks where they lie: on devices, where to gather them costs as much as to read them twice."""
        return self.kv_block_size is not None and self.target in HLO_TARGETS

    @property
    def shared_blocks(self) -> int:
        """Blocks with several owners that one run of a graph has places for, where blocks attend in place."""
        if self.batch_size == 1 or not self.blocks_in_place:
            return 0
        return -(-self.kv_blocks // BLOCKS_PER_SHARED)

    @property
    def returns_decode_logits(self) -> bool:
        """Whether decode rows return logits: asked for, or the only way to choose a token; or on the host, where it costs nothing
        and is how log-probabilities are told."""
        told_by_host = self.top_logprobs is not None and self.target not in HLO_TARGETS
        return self.output_logits or not self.on_device_sampling or told_by_host

    def fitted(self, positions: int | None) -> NeuronConfig:
        """Return the config with a default `sequence_length` lowered to a model's positions; one that was asked for stays."""
        if positions is None or not isinstance(self.sequence_length, _Default) or self.sequence_length <= positions:
            return self
        chunk = _DERIVED if self.prefill_chunk_size == self._default_chunk_size() else self.prefill_chunk_size
        return replace(self, sequence_length=positions, prefill_chunk_size=chunk)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-serializable dict that `from_dict` turns into an equal config."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> NeuronConfig:
        """Builds a config from named options.

        Raises:
            TypeError: an option has an unknown name or a value of the wrong type.
            ValueError: a value is out of range.
        """
        known = cls.option_names()
        for name in options:
            check.known_name(name, options[name], known)
        return cls(**options)

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """The names of all options."""
        return tuple(field.name for field in fields(cls))
