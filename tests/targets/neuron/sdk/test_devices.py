# SPDX-License-Identifier: Apache-2.0
"""Which devices this machine has, whether an artifact fits them, and what the runtime's errors mean."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.tools import NeuronTools, Sdk

from optimum_neuron.targets.neuron.sdk import devices as device
from optimum_neuron.targets.neuron.sdk.devices import NeuronDevices, check_devices, find_devices
from optimum_neuron.targets.neuron.sdk.errors import NRT_STATUSES, runtime_error, status_code


pytest_plugins = ("fakes.plugin",)


def test_devices_are_found_by_neuron_ls(neuron_sdk: Sdk, monkeypatch: pytest.MonkeyPatch) -> None:
    neuron_sdk("trn2", instance="trn2.48xlarge:16")
    assert find_devices() == NeuronDevices("trn2", 16, 128) and device.resolve_neuron_target("auto") == "trn2"
    assert check_devices("trn2", 2, 8) == list(range(8))
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "8-11,20")
    assert check_devices("trn2", 2, 1, replicas=5) == [8, 9, 10, 11, 20]
    assert check_devices("trn2", 2, 2, replicas=2) == [8, 9, 10, 11]
    with pytest.raises(RuntimeError, match=r"tensor_parallel_size=8 .* NEURON_RT_VISIBLE_CORES=8-11,20 names 5"):
        check_devices("trn2", 2, 8)
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "8,9,10,11,20")
    with pytest.raises(RuntimeError, match=r"=2 needs 6 logical cores for 3 replicas, and .* names 5"):
        check_devices("trn2", 2, 2, replicas=3)
    monkeypatch.setenv("NEURON_VISIBLE_DEVICES", "8-10")
    with pytest.raises(ValueError, match=r"_RT_VISIBLE_CORES=8-11,20 and NEURON_VISIBLE_DEVICES=8-10 name different"):
        check_devices("trn2", 2, 2)
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES")
    assert check_devices("trn2", 2, 2) == [8, 9]
    with pytest.raises(RuntimeError, match=r"and NEURON_VISIBLE_DEVICES=8-10 names 3"):
        check_devices("trn2", 2, 8)
    for visible, wrong in (("12-19", "12, 13, 14, 15, 16, 17, 18, 19"), ("0-3,8-11", "0, 1, 2, 3, 8, 9, 10, 11")):
        monkeypatch.setenv("NEURON_VISIBLE_DEVICES", visible)
        with pytest.raises(RuntimeError, match=rf"={visible} gives 8 ranks the cores {wrong}, .* multiple of 8; name"):
            check_devices("trn2", 2, 8)


def test_devices_are_found_without_neuron_ls(
    neuron_tools: NeuronTools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("neuron0", "neuron1", "neuron_core"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    (tmp_path / "product_name").write_text("trn1.32xlarge\n")
    assert find_devices() is None
    monkeypatch.setattr(device, "_DEVICE_FOLDER", tmp_path / "dev")
    monkeypatch.setattr(device, "_PRODUCT_NAME", tmp_path / "product_name")
    assert find_devices() == NeuronDevices("trn1", 2, 4)
    monkeypatch.setattr(device, "_PRODUCT_NAME", tmp_path / "nothing")
    assert find_devices() == NeuronDevices(None, 2, None)
    assert check_devices("inf2", 1, 3) == [0, 1, 2]


@pytest.mark.parametrize(
    ("instance", "ranks", "variable", "message"),
    [
        (None, 1, None, r"compiled for trn2, and this machine has no Neuron device; run it on a trn2 instance"),
        ("trn1.2xlarge:1", 1, None, r"compiled for trn2, and this machine has trn1 devices; export .*'trn1'"),
        ("trn2.3xlarge:1", 8, None, r"tensor_parallel_size=8 .* and this machine has 4; run it on a larger"),
        ("trn2.3xlarge:1", 1, "1", r"compiled for NEURON_LOGICAL_NC_CONFIG=2, and it is set to 1; set it to 2"),
    ],
)
def test_devices_that_do_not_fit_are_refused(
    neuron_tools: NeuronTools,
    monkeypatch: pytest.MonkeyPatch,
    instance: str | None,
    ranks: int,
    variable: str | None,
    message: str,
) -> None:
    for name, value in (("FAKE_NEURON_INSTANCE", instance), ("NEURON_LOGICAL_NC_CONFIG", variable)):
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=message):
        check_devices("trn2", 2, ranks)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("NRT Error NRT_EXEC_OOB(1006): Failed to execute model", 1006),
        ("NRT_FAILURE(6)", 6),
        ("nrt_execute: status=1004, error message", 1004),
        ("Failed with NRT_TIMEOUT", 5),
        ("The PyTorch Neuron Runtime could not be initialized.", 9),
        ("Failed to allocate nrt tensor", 4),
        ("something else", None),
        ("NRT_NEW_STATUS(4711)", None),
    ],
)
def test_status_codes_are_read_from_messages(text: str, code: int | None) -> None:
    assert status_code(text) == code
    error = runtime_error(text, "graph x")
    assert error.code == code
    assert error.recoverable == (code is not None and NRT_STATUSES[code].recoverable)


def test_dead_sessions_are_told_from_failed_steps() -> None:
    dead = {code for code, status in NRT_STATUSES.items() if not status.recoverable}
    assert {101, *range(1200, 1207)} <= dead
    assert not dead & {1002, 1003, 1004, 1005, 1006}
    assert all(status.meaning and status.remedy for status in NRT_STATUSES.values())
