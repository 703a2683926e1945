# SPDX-License-Identifier: Apache-2.0
"""Whose rules a lint applies: those of a named target, or of this machine's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from optimum_neuron.config import NeuronConfig
from optimum_neuron.targets.neuron.lowering import lower_all as model
from optimum_neuron.targets.neuron.lowering.lower_all import model_graphs
from optimum_neuron.targets.neuron.sdk import devices
from optimum_neuron.targets.neuron.sdk.devices import NeuronDevices


def test_auto_is_this_machines_devices_before_sizes_follow_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LlamaConfig(num_hidden_layers=1, max_position_embeddings=4096, dtype="bfloat16").save_pretrained(tmp_path)
    lowered: list[NeuronConfig] = []

    def lower_all(folder: Path, config: NeuronConfig, *args: Any, **options: Any) -> list[Any]:
        lowered.append(config)
        return []

    monkeypatch.setattr(model, "lower_all", lower_all)
    with pytest.raises(ValueError, match="'auto': this machine has no Neuron device; name one of inf2"):
        next(model_graphs(tmp_path, NeuronConfig()))
    monkeypatch.setattr(devices, "find_devices", lambda: NeuronDevices("trn1", 1, 2))
    with pytest.raises(ValueError, match="no group of cores that trn1 connects"):
        next(model_graphs(tmp_path, NeuronConfig(tensor_parallel_size=4)))
    assert list(model_graphs(tmp_path, NeuronConfig(sequence_length=4096))) == []
    assert [(one.target, one.context_buckets) for one in lowered] == [("trn1", (256, 1024, 4096))]
