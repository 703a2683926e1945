# SPDX-License-Identifier: Apache-2.0
"""What estimates say of published step times: of those that the constants were fitted to, and of those held out."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from transformers import AutoConfig

from benchmark.estimate.fit import accuracy, error, fit, left_out_errors
from benchmark.estimate.published import LLAMA_8B_INF2, MODELS, measurements
from optimum_neuron.targets.neuron.sdk.step_times import DECODE, PREFILL, STEP_TIMES
from optimum_neuron.tools.estimate.core_sizes import core_sizes
from optimum_neuron.tools.estimate.estimate import estimate_target
from optimum_neuron.tools.estimate.model_sizes import measure_model


def test_the_constants_are_what_the_fitted_runs_give() -> None:
    again = fit([one for one in measurements() if not one.run.held_out])
    for name, value in asdict(STEP_TIMES).items():
        assert getattr(again, name) == pytest.approx(value, rel=0.005), name


def test_the_accuracy_told_is_that_of_the_runs_and_the_ranges_hold_four_of_five_strangers() -> None:
    data = measurements()
    errors = left_out_errors(data)
    for kind, told in (("decode", DECODE), ("prefill", PREFILL)):
        found = accuracy(data, errors, kind, STEP_TIMES)
        assert asdict(found) == pytest.approx(asdict(told), abs=0.01) and found.held_out <= 0.25
        ratios = [1 / (1 + error(one, STEP_TIMES)) for one in data if one.kind == kind and one.stranger]
        inside = [told.low - 0.01 <= ratio <= told.high + 0.01 for ratio in ratios]
        assert len(ratios) >= 7 and sum(inside) >= 0.8 * len(inside)


def test_a_run_is_estimated_as_the_command_would() -> None:
    run = LLAMA_8B_INF2
    sizes = measure_model(AutoConfig.for_model(**MODELS[run.model]), run.model, "bfloat16", trust_remote_code=False)
    options = {name: getattr(run, name) for name in ("target", "tensor_parallel_size", "batch_size")}
    options |= {"sequence_length": run.context_length, "prefill_chunk_size": run.prompt_tokens, "dtype": "bfloat16"}
    one = estimate_target(core_sizes(sizes, run.tensor_parallel_size), options, run.context_length, run.context_length)
    decode, prefill = (found for found in measurements() if found.run is run)
    assert one.fits
    assert one.decode.expected_s * 1e3 == pytest.approx((1 + error(decode, STEP_TIMES)) * decode.milliseconds)
    first = run.chunks * one.prefill.expected_s + STEP_TIMES.request_s
    assert first * 1e3 == pytest.approx((1 + error(prefill, STEP_TIMES)) * prefill.milliseconds)
    assert one.decode.low_s == pytest.approx(one.decode.expected_s * DECODE.low)
    assert one.prefill.high_s == pytest.approx(one.prefill.expected_s * PREFILL.high)
