# SPDX-License-Identifier: Apache-2.0
"""When the plugin is vLLM's platform, and when it leaves somebody else's vLLM alone."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from optimum_neuron.targets.neuron.run.device import NeuronDevices
from optimum_neuron.vllm import activation
from optimum_neuron.vllm.activation import PLATFORM_GROUP, is_wanted


OURS = EntryPoint("optimum_neuron", "optimum_neuron.vllm:platform_plugin", PLATFORM_GROUP)
OTHER = EntryPoint("other", "other:plugin", PLATFORM_GROUP)
SERVE = ("vllm", "serve")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what a machine has: a device of vLLM's own, a Neuron device, another platform plugin."""

    def make(*, vllm_device: bool = False, neuron: bool = False, other_plugin: bool = False) -> None:
        plugins = [OURS, OTHER] if other_plugin else [OURS]
        monkeypatch.setattr(activation, "entry_points", lambda group: plugins)
        devices = NeuronDevices("trn2", 1, 8) if neuron else None
        monkeypatch.setattr(activation, "find_devices", lambda: devices)
        monkeypatch.setattr(activation, "_vllm_has_a_platform", lambda: vllm_device)

    make()
    return make


@pytest.mark.parametrize(
    ("has", "wanted"),
    [
        ({}, True),
        ({"vllm_device": True}, False),
        ({"neuron": True, "vllm_device": True}, True),
        ({"other_plugin": True}, False),
        ({"other_plugin": True, "neuron": True}, False),
    ],
    ids=str,
)
def test_a_machine_decides_where_nobody_says(
    machine: Callable[..., None], text_checkpoint: Path, has: dict[str, Any], wanted: bool
) -> None:
    machine(**has)
    assert is_wanted([*SERVE, str(text_checkpoint)], {}) is wanted
    assert is_wanted(["script.py"], {"VLLM_TARGET_DEVICE": "empty", "VLLM_PLUGINS": "another"}) is wanted


@pytest.mark.parametrize("name", ["{}", "{}/", "--model={}"], ids=["argument", "with_slash", "option"])
def test_an_artifact_on_the_command_line_is_ours_on_any_machine(
    machine: Callable[..., None], export_text: Callable[..., Path], name: str
) -> None:
    machine(vllm_device=True, other_plugin=True)
    assert is_wanted([*SERVE, "--port", "80", name.format(export_text())], {})


def test_folders_that_are_no_artifact_are_not_ours(machine: Callable[..., None], tmp_path: Path) -> None:
    machine(vllm_device=True)
    for text in ("", "[]", "{}", '{"format": "another"}', "\x00"):
        (tmp_path / "neuron_config.json").write_text(text, encoding="utf-8")
        assert not is_wanted([*SERVE, str(tmp_path)], {})


def test_the_environment_decides_before_anything_else(
    machine: Callable[..., None], export_text: Callable[..., Path]
) -> None:
    machine(vllm_device=True, other_plugin=True)
    assert is_wanted(["script.py"], {"VLLM_PLUGINS": "lora_resolver, optimum_neuron", "VLLM_TARGET_DEVICE": "cuda"})
    assert not is_wanted([*SERVE, str(export_text())], {"VLLM_TARGET_DEVICE": "cuda"})
    machine(neuron=True)
    assert not is_wanted(["script.py"], {"VLLM_TARGET_DEVICE": "cpu"})
    assert is_wanted(["script.py"], {"VLLM_TARGET_DEVICE": "neuron"})
