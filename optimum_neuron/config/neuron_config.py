# SPDX-License-Identifier: Apache-2.0
"""NeuronConfig: the sizes and options that are fixed when graphs are compiled. It knows no files, models or devices."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from . import checks
from .graph_options import DERIVED, HLO_TARGETS, DefaultSize
from .graph_sizes import GraphSizes
from .option import documented, read_dtype


DEFAULT_CHUNK_LIMIT = 512
DEFAULT_SMALLEST_CONTEXT = 256


class _Followed(tuple[int, ...]):
    """Default sizes: where `dataclasses.replace` changes the options that they follow from, they follow again."""

    __slots__ = ()


@documented
@dataclass(frozen=True, kw_only=True)
class NeuronConfig(GraphSizes):
    """Compile-time facts of an artifact.

    Sizes are in tokens. Those that are left out (None) follow from the others, so that an instance is always complete.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is out of range, or two values contradict each other.
    """

    def __post_init__(self) -> None:
        self._set(dtype=read_dtype(self.dtype), kernels=checks.take_names("kernels", self.kernels))
        if self.quantization_exclude is not None:
            patterns = checks.take_names("quantization_exclude", self.quantization_exclude, "patterns of names")
            self._set(quantization_exclude=patterns)
        checks.check_values(self)
        if self.mixed_step is None:
            self._set(mixed_step=self.batch_size > 1)
        if self.activations == "none" or (self.activations == "auto" and self.target in HLO_TARGETS):
            self._set(activations=None)
        checks.check_quantization(self)
        checks.check_types(self)
        checks.check_blocks(self)
        self.check_kept_states()
        if self.prefill_chunk_size is None:
            self._set(prefill_chunk_size=self._default_chunk_size())
        self._set(prefill_chunk_buckets=checks.take_sizes("prefill_chunk_buckets", self.prefill_chunk_buckets))
        if self.context_buckets is None or isinstance(self.context_buckets, _Followed):
            self._set(context_buckets=_Followed(self._default_context_buckets()))
        else:
            self._set(context_buckets=checks.take_sizes("context_buckets", self.context_buckets))
        checks.check_sizes(self)
        checks.check_buckets(self)

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _default_chunk_size(self) -> int:
        decode_tokens = 0 if self.kv_block_size else self.batch_size
        room = (self.sequence_length - decode_tokens) // self.ctx_batch_size
        if room < 1:
            checks.check_cached_tokens(self)
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

    def fitted(self, positions: int | None) -> NeuronConfig:
        """Return the config with a default `sequence_length` lowered to a model's positions; one that was asked for stays."""
        if positions is None or not isinstance(self.sequence_length, DefaultSize) or self.sequence_length <= positions:
            return self
        chunk = DERIVED if self.prefill_chunk_size == self._default_chunk_size() else self.prefill_chunk_size
        return replace(self, sequence_length=positions, prefill_chunk_size=chunk)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict that `from_dict` turns into an equal config."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
