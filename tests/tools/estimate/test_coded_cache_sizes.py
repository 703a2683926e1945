# SPDX-License-Identifier: Apache-2.0
"""Codes of keys and values as the estimate counts them: what an artifact has, and what a step reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers import tiny_config
from tiny import TINY_CONFIGS

from optimum_neuron.step.state_sizes import StateSizes, byte_count
from optimum_neuron.step.state_specs import state_specs
from optimum_neuron.tools.estimate.core_sizes import core_sizes
from optimum_neuron.tools.estimate.estimate import estimate_model
from optimum_neuron.tools.estimate.model_sizes import measure
from optimum_neuron.tools.estimate.step_needs import cache_bytes


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_bytes_of_codes_are_those_of_the_states(kind: str, tmp_path: Path) -> None:
    sizes = measure(TINY_CONFIGS["llama"](), "llama", "bfloat16", trust_remote_code=False)
    for cores in (1, 2):
        core, config = core_sizes(sizes, cores), tiny_config(dtype="bfloat16", kv_cache_dtype=kind)
        states = state_specs(config, core.spec)
        assert cache_bytes(core, config) == byte_count(states)
    TINY_CONFIGS["llama"]().save_pretrained(tmp_path)
    options = {"batch_size": 2, "sequence_length": 128, "kv_cache_dtype": kind, "dtype": "bfloat16"}
    report = estimate_model(str(tmp_path), options, ("trn1", "trn2"), tensor_parallel_size=1)
    assert {each.config.target for each in report.estimates} == ({"trn2"} if kind == "fp8" else {"trn1", "trn2"})
    coded = StateSizes.of(state_specs(tiny_config(dtype="bfloat16", kv_cache_dtype=kind), sizes.spec)).per_token
    core = core_sizes(sizes, 1)
    assert replace(core, cache_has_codes=True).token_bytes == coded < core.token_bytes
