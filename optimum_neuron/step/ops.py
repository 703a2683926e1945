# SPDX-License-Identifier: Apache-2.0
"""The operators of a step that a target may replace by its own: all else is transformers' modelling code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from . import kv_cache
from .attention import CacheAttention, CacheWrite, DecodeAttention, ReadsVisible, attend_cache
from .features.codes.coded_states import Stored
from .features.codes.modules import QuantizedProduct, reference_product
from .features.convolution.convolution import SlotConvolution
from .features.experts.experts import Experts, active_experts, dense_experts
from .features.recurrence.recurrence import Scan
from .features.recurrence.scan_grid import delta_rule, selective_scan, state_space_scan
from .interface import AttentionCall
from .sampling.eager_sampling import sample_by_sorting
from .sampling.sampler import sample


# From `logits [rows, vocab]`, `sampling_params [rows, 4]` and `uniforms [rows]` to `tokens [rows]` int32.
Sampler = Callable[[Tensor, Tensor, Tensor], Tensor]


def _as_they_are(tensor: Tensor) -> Tensor:
    return tensor


def _reads_all(call: AttentionCall, keys: Stored, values: Stored) -> bool:
    return False


@dataclass(frozen=True)
class StepOps:
    """How a step attends, writes the cache, multiplies, convolves, computes experts and recurrences, and chooses tokens; the defaults
    are the reference.

    Attributes:
        attend_cache: attention of one row group over a layer's cache, with the step's tokens in it.
        attend_decode: attention of decode rows over a layer's cache before the step and over their own tokens, so that nothing
            of it waits for the write; None: they attend as chunk rows do.
        write_cache: puts the keys or values of the step's tokens into a layer's cache, in place; rounds them where it has codes.
        reads_visible: which calls `attend_cache` serves without looking at what a token does not see.
        quantized_linear: a linear layer whose weight is quantized.
        convolve: a layer's short convolution over the tokens of each slot; None: as SlotConvolutions does.
        experts: a layer's routed experts, of those layers that use transformers' experts interface.
        delta_rule, state_space_scan, selective_scan: a layer's recurrence, of those layers that compute it by functions of these kinds.
        sample: the on-device sampler, from what the model's head returns.
        full_logits: the logits of the whole vocabulary, from what the model's head returns.
        output_rows: the tokens that reach the head, `[rows]` int32, as they are: marks them for a compiler.
    """

    attend_cache: CacheAttention = attend_cache
    attend_decode: DecodeAttention | None = None
    write_cache: CacheWrite = kv_cache.write
    reads_visible: ReadsVisible = _reads_all
    quantized_linear: QuantizedProduct = reference_product
    convolve: SlotConvolution | None = None
    experts: Experts = dense_experts
    delta_rule: Scan = delta_rule
    state_space_scan: Scan = state_space_scan
    selective_scan: Scan = selective_scan
    sample: Sampler = sample
    full_logits: Callable[[Tensor], Tensor] = _as_they_are
    output_rows: Callable[[Tensor], Tensor] = _as_they_are


DEFAULT_OPS = StepOps()
# For step modules that run as they are. No graph can contain it.
EAGER_OPS = StepOps(experts=active_experts, sample=sample_by_sorting)
