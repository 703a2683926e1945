# SPDX-License-Identifier: Apache-2.0
"""Exports and the scheduler make what small_record.json has: a change that only moves code changes no graph and no plan.

A change that is meant to do so writes it anew: `python -m tests.records record tests/records/small_record.json --models llama lfm2
quantized --targets cpu eager`.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
from documents import ROOT
from records.record import differences, digest_model, versions
from records.schedules import PLANS, PLANS_OF_A_DIGEST, digest_schedules


EXPECTED = json.loads(Path(__file__).with_name("small_record.json").read_text(encoding="utf-8"))


def test_the_scheduler_plans_as_recorded() -> None:
    assert sum(map(len, EXPECTED["schedules"].values())) == PLANS // PLANS_OF_A_DIGEST
    assert differences(EXPECTED["schedules"], digest_schedules()) == []


# Other versions of them trace other graphs; the next test holds that `make test` has the recorded ones.
@pytest.mark.skipif(versions() != EXPECTED["versions"], reason=f"graphs are recorded for {EXPECTED['versions']}")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name == "lfm2")) for name in EXPECTED["models"]]
)
def test_exports_make_the_recorded_graphs_and_weights(name: str) -> None:
    expected = EXPECTED["models"][name]
    assert differences(expected, digest_model(name, expected)) == []


def test_the_record_is_of_the_versions_that_make_installs() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    installed = {name: re.search(rf"^{name.upper()} \?= (\S+)$", text, re.MULTILINE) for name in EXPECTED["versions"]}
    assert EXPECTED["versions"] == {name: found and found[1] for name, found in installed.items()}


def test_a_difference_is_named_by_model_target_and_file() -> None:
    changed = copy.deepcopy(EXPECTED)
    graphs = changed["models"]["llama"]["cpu"]
    graphs["manifest"], graphs["graphs/new.json"] = "0", "1"
    (first, second) = differences(EXPECTED, changed)
    assert first == "models, llama, cpu, graphs/new.json: 1 instead of nothing"
    assert second.startswith("models, llama, cpu, manifest: 0 instead of ")
