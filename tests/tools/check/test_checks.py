# SPDX-License-Identifier: Apache-2.0
"""What optimum-cli neuron check refuses, and what it reads of neuron-monitor. tests/targets/neuron has the checks themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import Cli

from optimum_neuron.tools.check import checks
from optimum_neuron.tools.check.checks import REMEDIES, CheckReport
from optimum_neuron.tools.check.step_checks import CheckError


REPORT = (
    '{"neuron_runtime_data": [{"report": {"memory_used": {"neuron_runtime_used_bytes": {"neuron_device": 1500000000}}}},'
    ' {"report": {"memory_used": {"neuron_runtime_used_bytes": {"neuron_device": 500000000}}}}]}'
)


def test_help_tells_every_check(cli: Cli) -> None:
    code, shown, _ = cli("neuron", "check", "--help")
    told = [line.partition("  ")[0] for line in shown.split("one does not stop the others:")[1].splitlines()]
    assert code == 0 and [name for name in told if name in REMEDIES] == list(REMEDIES)
    assert all(option in shown for option in ("--profile", "--json", "--rank-python", "--rank-timeout"))


def test_every_failed_check_has_a_remedy_and_is_no_end_and_a_skipped_one_fails_nothing() -> None:
    report = CheckReport({})
    for name in REMEDIES:
        assert not report.run_check(name, lambda: {}["missing"])
    assert [result.status for result in report.results] == ["failed"] * len(REMEDIES)
    assert all(result.remedy and "KeyError" in result.problem for result in report.results)
    assert not report.passed and report.to_dict()["passed"] is False
    report = CheckReport({})
    assert not report.run_check("memory", lambda: pytest.fail("it ran"), skipped="there is no device")
    assert report.passed and report.results[0].problem == "there is no device"


def test_memory_is_that_of_all_processes_and_a_monitor_that_says_nothing_is_a_finding_and_no_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "neuron-monitor"
    monkeypatch.setattr(checks, "MONITOR", str(tool))
    for script in (f"echo '{REPORT}'; exec sleep 600", "exec sleep 600", "exit 3"):
        tool.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        tool.chmod(0o755)
        if script.startswith("echo"):
            assert checks._measure_memory() == {"device GB": 2.0}
            monkeypatch.setattr(checks, "MONITOR_LIMIT_S", 0.2)
            continue
        with pytest.raises(CheckError, match="reported nothing"):
            checks._measure_memory()
