# SPDX-License-Identifier: Apache-2.0
"""Estimates of any sizes: what fits is where the largest sizes say, more never needs less, nothing exceeds the peak."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers import examples
from hypothesis import assume, given
from hypothesis import strategies as st

from optimum_neuron.config import NEURON_TARGETS, NeuronConfig
from optimum_neuron.step.attention.state import KeyValueState
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.spec import graph_specs
from optimum_neuron.targets.neuron.operators.expert_forms import ExpertLayer
from optimum_neuron.targets.neuron.sdk.hardware import CHIPS, GIB
from optimum_neuron.tools.estimate.core_sizes import AttentionSizes, CoreSizes, ExpertSizes
from optimum_neuron.tools.estimate.estimate import estimate_target
from optimum_neuron.tools.estimate.step_needs import core_memory, live_bytes


DTYPE = "bfloat16"


@st.composite
def core_models(draw: st.DrawFn) -> CoreSizes:
    """A core's part of a model, of any sizes."""
    layers, heads, dim = draw(st.integers(1, 100)), draw(st.integers(1, 16)), draw(st.sampled_from([64, 128]))
    kv_heads = draw(st.integers(1, heads))
    few, many = ExpertLayer(8, 2, 4096, 4096, 2048, DTYPE, 2), ExpertLayer(128, 4, 4096, 512, 256, DTYPE, 2)
    experts = draw(st.sampled_from([(), (ExpertSizes(few, 5, 2 * GIB),), (ExpertSizes(many, 2, 2 * GIB),)]))
    return CoreSizes(
        weight_bytes=draw(st.integers(4, 30)) * GIB,
        table_bytes=draw(st.integers(0, GIB)),
        linear_params=draw(st.integers(1, 10 * GIB)),
        head_params=draw(st.integers(0, GIB)),
        experts=experts,
        attention=(AttentionSizes(layers, heads, kv_heads, dim, dim),),
        block_width=draw(st.integers(1, 100_000)),
        spec=ModelSpec(
            32_000, tuple(KeyValueState(layer, kv_heads, dim, dim) for layer in range(layers)), num_embeddings=32_000
        ),
        local_vocab=draw(st.integers(1, 32_000)),
        hidden_size=draw(st.integers(1, 16_384)),
        keeps_logits=draw(st.booleans()),
        dtype=DTYPE,
        itemsize=2,
    )


@st.composite
def sizes_asked(draw: st.DrawFn) -> dict[str, Any]:
    """Valid options; what follows from others is often left to them."""
    options = {
        "target": draw(st.sampled_from(NEURON_TARGETS)),
        "dtype": "bfloat16",
        "batch_size": draw(st.integers(1, 64)),
        "sequence_length": draw(st.integers(64, 40_000) | st.sampled_from([256, 1024, 4096, 8192, 32_768])),
        "ctx_batch_size": draw(st.integers(1, 3)),
        "prefill_chunk_size": draw(st.none() | st.sampled_from([16, 128, 512, 1024])),
        "mixed_step": draw(st.none() | st.booleans()),
        "context_buckets": draw(st.none() | st.just((512,))),
        "output_logits": draw(st.booleans()),
    }
    if options["context_buckets"] is not None:
        options["context_buckets"] = tuple(sorted({512, options["sequence_length"]}))
    try:
        NeuronConfig.from_dict(options)
    except ValueError:
        assume(False)
    return options


def fits(core: CoreSizes, options: dict[str, Any]) -> bool:
    config = NeuronConfig.from_dict(options)
    chip = CHIPS[config.target]
    return core_memory(core, config, chip).total <= chip.core_hbm


@examples(100)
@given(core_models(), sizes_asked(), st.booleans())
def test_what_fits_is_where_the_largest_sizes_say(core: CoreSizes, options: dict[str, Any], limited: bool) -> None:
    limit = options["sequence_length"] if limited else 1 << 17
    one = estimate_target(core, options, options["sequence_length"], limit)
    config, chunk = one.config, one.config.prefill_chunk_size
    room = one.hbm - one.memory.total
    for extra in (0, 1):
        assert fits(replace(core, weight_bytes=core.weight_bytes + room + extra), options) == (not extra)
    assert one.fits == fits(core, options) == (one.largest_batch >= config.batch_size)
    assert one.fits == (one.longest_sequence >= config.sequence_length)
    pinned = estimate_target(core, {**options, "prefill_chunk_size": chunk}, 1, limit)
    assert (pinned.largest_batch, pinned.longest_sequence) == (one.largest_batch, one.longest_sequence)
    for batch in (one.largest_batch, one.largest_batch + 1):
        if config.ctx_batch_size <= batch <= config.sequence_length - config.ctx_batch_size * chunk:
            changed = {**options, "prefill_chunk_size": chunk, "batch_size": batch}
            if batch > 1 or not options["mixed_step"]:
                assert fits(core, changed) == (batch == one.largest_batch)
    if options["context_buckets"] is None and one.longest_sequence:
        changed = {**options, "prefill_chunk_size": chunk}
        assert fits(core, {**changed, "sequence_length": one.longest_sequence})
        longer = max(one.longest_sequence + 1, -(-(one.longest_sequence + 1) // 1024) * 1024)
        if 1024 <= longer <= limit:
            assert not fits(core, {**changed, "sequence_length": longer})


@examples(100)
@given(core_models(), sizes_asked(), st.integers(1, 8))
def test_more_never_needs_less(core: CoreSizes, options: dict[str, Any], times: int) -> None:
    config = NeuronConfig.from_dict(options)
    chip = CHIPS[config.target]
    fixed = {**options, "prefill_chunk_size": config.prefill_chunk_size, "context_buckets": config.context_buckets}
    longer = config.sequence_length * times
    changes = [
        {"batch_size": config.batch_size * times},
        {"sequence_length": longer, "context_buckets": (*config.context_buckets[:-1], longer)},
    ]
    for change in changes:
        try:
            changed = NeuronConfig.from_dict(fixed | change)
        except ValueError:
            continue
        both = (NeuronConfig.from_dict(fixed), changed)
        less, more = (core_memory(core, one, chip) for one in both)
        for part in ("weights", "kv_cache", "activations", "reserve", "total"):
            assert getattr(less, part) <= getattr(more, part)
        # Not in whole pages, of which most changes need as many.
        few, many = (max(live_bytes(core, graph, chip, one.scan_block) for graph in graph_specs(one)) for one in both)
        assert few <= many


@examples(100)
@given(core_models(), sizes_asked())
def test_nothing_exceeds_the_peak_and_longer_contexts_are_slower(core: CoreSizes, options: dict[str, Any]) -> None:
    length = options["sequence_length"]
    short, full = (estimate_target(core, options, context, length) for context in (1, length))
    for one in (short, full):
        for step in (one.decode, one.prefill):
            assert step.expected_s > step.peak_s > 0
            assert step.peak_s <= step.low_s < step.expected_s < step.high_s
            assert step.rates[0] < step.expected_rate < step.rates[1] <= step.peak_rate
            assert step.expected_rate == pytest.approx(step.tokens / step.expected_s)
    assert short.decode.peak_s <= full.decode.peak_s and short.prefill.expected_s <= full.prefill.expected_s
