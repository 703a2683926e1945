# SPDX-License-Identifier: Apache-2.0
"""Groups of cores: what each host's topology takes, and that every command refuses the others before it does anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import export_tiny
from transformers import LlamaConfig

from optimum_neuron.config import NEURON_TARGETS
from optimum_neuron.targets.neuron.sdk import devices
from optimum_neuron.targets.neuron.sdk.devices import NeuronDevices
from optimum_neuron.targets.neuron.sdk.hardware import INSTANCES, PARALLEL_SIZES, check_parallel_size, hosts_of
from optimum_neuron.tools.estimate.estimate import estimate_model


SIZES_BY_HOST = {
    "inf2.xlarge": (1, 2),
    "inf2.8xlarge": (1, 2),
    "inf2.24xlarge": (1, 2, 4, 8),
    "inf2.48xlarge": (1, 2, 4, 8, 24),
    "trn1.2xlarge": (1, 2),
    "trn1.32xlarge": (1, 2, 8, 16, 32),
    "trn1n.32xlarge": (1, 2, 8, 16, 32),
    "trn2.3xlarge": (1, 2, 4),
    "trn2.48xlarge": (1, 2, 4, 8, 16, 32, 64),
    "trn2u.48xlarge": (1, 2, 4, 8, 16, 32, 64),
    "trn3 Gen2 server": (1, 2, 4, 8, 16),
    "trn3 Gen1 server": (1, 2, 4, 8, 16, 32, 64),
}


def test_each_host_takes_what_its_cores_and_its_topology_allow() -> None:
    assert {host.name: host.parallel_sizes for host in INSTANCES} == SIZES_BY_HOST
    assert [host.name for host in hosts_of("inf2", 8)] == ["inf2.24xlarge", "inf2.48xlarge"]
    assert hosts_of("inf2", 12) == ()
    for target in NEURON_TARGETS:
        for size in PARALLEL_SIZES[target]:
            check_parallel_size(target, size)
            assert hosts_of(target, size)


@pytest.mark.parametrize(
    ("target", "size", "told"),
    [
        ("inf2", 12, "inf2 connects, which are 1, 2, 4, 8, 24; use 8 or 24"),
        ("inf2", 16, "use 8 or 24"),
        ("inf2", 25, "use 24"),
        ("trn1", 4, "1, 2, 8, 16, 32; use 2 or 8"),
        ("trn1", 24, "use 16 or 32"),
        ("trn2", 3, "use 2 or 4"),
        ("trn2", 128, "use 64"),
        ("trn3", 48, "use 32 or 64"),
    ],
)
def test_other_sizes_are_refused_with_the_nearest(
    target: str, size: int, told: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    checkpoint, sentence = (
        tiny_checkpoints["llama"],
        rf"tensor_parallel_size={size} is no group of cores that .*{told}$",
    )
    with pytest.raises(ValueError, match=sentence):
        export_tiny(checkpoint, tmp_path / "out", target=target, tensor_parallel_size=size)
    with pytest.raises(ValueError, match=sentence):
        estimate_model(str(checkpoint), {"sequence_length": 64}, [target], tensor_parallel_size=size)
    assert not list(tmp_path.iterdir())


def test_a_size_that_some_targets_take_leaves_out_the_others(tiny_checkpoints: dict[str, Path]) -> None:
    report = estimate_model(
        str(tiny_checkpoints["llama"]), {"sequence_length": 64}, ["inf2", "trn1", "trn2"], tensor_parallel_size=4
    )
    assert [one.config.target for one in report.estimates] == ["inf2", "trn2"]
    assert any("trn1 connects, which are 1, 2, 8, 16, 32; use 2 or 8." in note for note in report.notes)
    assert [host.name for host in report.estimates[1].hosts] == ["trn2.3xlarge", "trn2.48xlarge", "trn2u.48xlarge"]


def test_auto_is_this_machines_devices_before_sizes_follow_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "find_devices", lambda: NeuronDevices("trn1", 1, 2))
    LlamaConfig(num_hidden_layers=1, max_position_embeddings=4096, dtype="bfloat16").save_pretrained(tmp_path)
    options = {"sequence_length": 4096}
    (one,) = estimate_model(str(tmp_path), options, ["auto", "trn1"], tensor_parallel_size=1).estimates
    assert (one.config.target, one.config.context_buckets) == ("trn1", (256, 1024, 4096))


def test_auto_without_known_devices_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for found, told in ((None, "no Neuron device"), (NeuronDevices(None, 1, None), "of an unknown generation")):
        monkeypatch.setattr(devices, "find_devices", lambda found=found: found)
        with pytest.raises(ValueError, match=f"'auto': this machine has .*{told}; name one of inf2"):
            estimate_model(str(tmp_path), {}, ["auto"])
    with pytest.raises(ValueError, match="'cpu' is no Neuron device; name one of inf2"):
        estimate_model(str(tmp_path), {}, ["cpu"])
