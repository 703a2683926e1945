# SPDX-License-Identifier: Apache-2.0
"""Which scales of a loaded artifact are taken for short ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import artifact_runner, export_tiny

from optimum_neuron.kernels.plan import Plan
from optimum_neuron.kernels.run.bound_plan import BoundPlan


@pytest.mark.parametrize(
    ("options", "are_short"),
    [
        ({}, True),
        ({"quantization_zero_point": True}, False),
        ({"activations": "int8"}, False),
        ({"dtype": "float32"}, False),
    ],
)
def test_scales_of_an_export_in_int4_are_short_where_sums_need_not_be_scaled(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], are_short: bool
) -> None:
    options = {"dtype": "bfloat16", "quantization": "int4"} | options
    path = export_tiny(tiny_checkpoint, tmp_path / "artifact", target="cpu", **options)
    found: list[frozenset[str]] = []
    bind = Plan.bind

    def watched(*arguments: Any, **options: Any) -> BoundPlan:
        found.append(options["short_scales"])
        return bind(*arguments, **options)

    monkeypatch.setattr(Plan, "bind", watched)
    artifact_runner(path)
    assert len(set(found)) == 1  # all graphs sum alike
    assert all("_proj" in name for name in found[0])
    assert bool(found[0]) == are_short
