# SPDX-License-Identifier: Apache-2.0
"""Fixtures that make this machine look like one with the Neuron SDK.

`neuron_tools` puts neuronx-cc and neuron-ls on PATH. `neuron_sdk(target, ...)` adds Python packages and devices. A test module gets
them by `pytest_plugins = ("fakes.plugin",)`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google import protobuf

from optimum_neuron.targets.neuron.graphs import hlo

from .tools import NeuronTools, Sdk


FAKES = Path(__file__).parent
SITE = FAKES / "site"
INSTANCES = {"inf2": "inf2.8xlarge:1", "trn1": "trn1.32xlarge:16", "trn2": "trn2.3xlarge:1", "trn3": "trn3.48xlarge:1"}
# What packages of the fakes leave behind in a process.
_MODULES = ("fake_neuron", "torch_neuronx", "libneuronxla", "neuronx_distributed", "nrtpy", "nki", "nkilib")


@pytest.fixture
def neuron_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NeuronTools:
    """neuronx-cc and neuron-ls on PATH, a compile cache of the test's own, and no devices."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for command in ("neuronx-cc", "neuron-ls"):
        script = (FAKES / "bin" / f"{command.replace('-', '_')}.py").read_text(encoding="utf-8")
        (folder / command).write_text(f"#!{sys.executable} -S\n{script}", encoding="utf-8")
        (folder / command).chmod(0o755)
    tools = NeuronTools(folder, tmp_path / "neuronx-cc.log", tmp_path / "fault.json", monkeypatch)
    for name in [name for name in os.environ if name.startswith(("NEURON_", "FAKE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    folders = SITE / "device", Path(protobuf.__file__).parents[2], Path(hlo.__file__).parent
    monkeypatch.setenv("FAKE_NEURON_SITE", os.pathsep.join(map(str, folders)))
    monkeypatch.setenv("FAKE_NCC_LOG", str(tools.log))
    monkeypatch.setenv("FAKE_NEURON_FAULT", str(tools.fault))
    monkeypatch.setenv("FAKE_NKI_FOLDER", str(tmp_path))
    monkeypatch.setenv("OPTIMUM_NEURON_CACHE", str(tmp_path / "cache"))
    return tools


@pytest.fixture
def neuron_sdk(neuron_tools: NeuronTools, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sdk]:
    """A function that installs packages and devices: `neuron_sdk("trn2", "nrt")`.

    Packages are "nrt" (nrtpy), "nxd" (torch-neuronx and neuronx-distributed), "nki" (with nki-library) and "placeholder".
    """

    def install(target: str | None, *packages: str, instance: str | None = None) -> NeuronTools:
        folders = [str(SITE / name) for name in ("device", *packages)]
        for folder in reversed(folders):
            monkeypatch.syspath_prepend(folder)
        inherited = filter(None, [os.environ.get("PYTHONPATH")])
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*folders, *inherited]))
        if target is not None:
            monkeypatch.setenv("FAKE_NEURON_INSTANCE", instance or INSTANCES[target])
            monkeypatch.setenv("FAKE_NEURON_GENERATION", target)
            # Set by the first load in this process; undone with the others.
            monkeypatch.setenv("NEURON_RT_NUM_CORES", "")
            monkeypatch.delenv("NEURON_RT_NUM_CORES")
            monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "")
            monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG")
        return neuron_tools

    _forget_modules()
    yield install
    _forget_modules()


def _forget_modules() -> None:
    if "torch_neuronx" in sys.modules:
        sys.modules["torch_neuronx"]._uninstall()
    for name in [name for name in sys.modules if name.partition(".")[0] in _MODULES]:
        del sys.modules[name]
    importlib.invalidate_caches()
