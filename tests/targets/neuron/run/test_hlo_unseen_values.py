# SPDX-License-Identifier: Apache-2.0
"""In the lowered graphs too, what a token does not see has no effect, whatever it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from canaries import CANARIES, same_bits, serve_steps
from helpers import LOWERED, artifact_runner

from optimum_neuron.step.model_spec import ModelSpec


@pytest.mark.parametrize("name", LOWERED)
def test_what_no_token_sees_and_what_a_neighbor_holds_changes_no_bit(
    name: str, hlo_artifact: Callable[[str], Path], tiny_specs: dict[str, ModelSpec]
) -> None:
    runner, spec = artifact_runner(hlo_artifact(name)), tiny_specs[name]
    clean, beside = serve_steps(runner, spec), serve_steps(runner, spec, neighbor=0.0)
    for canary in CANARIES:
        assert same_bits(serve_steps(runner, spec, unseen=canary), clean)
        assert same_bits(serve_steps(runner, spec, neighbor=canary), beside)
