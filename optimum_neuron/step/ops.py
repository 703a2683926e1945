# SPDX-License-Identifier: Apache-2.0
"""The operators of a step that a target may replace. All else is transformers' modelling code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .attention import kv_cache
from .attention.cached_attention import CacheAttention, CacheWrite, DecodeAttention, ReadsVisible, attend_cache
from .features.codes.modules import QuantizedProduct, reference_product
from .features.convolution.convolution import SlotConvolution
from .features.experts.experts import Experts, active_experts, dense_experts
from .features.recurrence.recurrence import Scan
from .features.recurrence.scan_grid import scan_rows
from .sampling.sampler import sample, sample_by_sorting


# From `logits [rows, vocab]`, `sampling_params [rows, 4]` and `uniforms [rows]` to `tokens [rows]` int32.
Sampler = Callable[[Tensor, Tensor, Tensor], Tensor]


def _as_they_are(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class StepOps:
    """The operators of a step; the defaults are the reference.

    Attributes:
        attend_cache: attention of one row group over a layer's cache, with the step's tokens in it.
        attend_decode: attention of decode rows before the step's write, which it need not wait for; None: as chunk rows.
        write_cache: puts keys or values of the step's tokens into a layer's cache, in place.
        reads_visible: whether `attend_cache` reads no column that a token does not see in a call; None: in none.
        convolve: a layer's short convolution over the tokens of each slot; None: as SlotConvolutions does.
        experts: the routed experts of layers that use transformers' experts interface.
        sample, full_logits: tokens, and logits of the whole vocabulary, from what the model's head returns.
        output_rows: the tokens that reach the head, `[rows]` int32, unchanged: marks them for a compiler.
    """

    attend_cache: CacheAttention = attend_cache
    attend_decode: DecodeAttention | None = None
    write_cache: CacheWrite = kv_cache.write_tokens
    reads_visible: ReadsVisible | None = None
    quantized_linear: QuantizedProduct = reference_product
    convolve: SlotConvolution | None = None
    experts: Experts = dense_experts
    delta_rule: Scan = scan_rows
    state_space_scan: Scan = scan_rows
    selective_scan: Scan = scan_rows
    sample: Sampler = sample
    full_logits: Callable[[Tensor], Tensor] = _as_they_are
    output_rows: Callable[[Tensor], Tensor] = _as_they_are


DEFAULT_OPS = StepOps()
# For step modules that run as they are. No graph can contain it.
EAGER_OPS = StepOps(experts=active_experts, sample=sample_by_sorting)
