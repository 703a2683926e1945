# SPDX-License-Identifier: Apache-2.0
"""Groups of cores that hosts take, and models with quantized weights and caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import export_tiny, tiny_config
from tiny import TINY_CONFIGS, TINY_SIZES
from transformers import AutoModelForCausalLM, LlamaConfig

from optimum_neuron.artifact.quantization import write_formats
from optimum_neuron.artifact.weights import named_tensors
from optimum_neuron.checkpoints.quantize.quantize import formats_of, quantize
from optimum_neuron.config import NEURON_TARGETS, NeuronConfig
from optimum_neuron.step.features.codes.modules import weight_formats
from optimum_neuron.step.interface import ATTENTION_NAME
from optimum_neuron.step.state_specs import StateSizes, byte_count, state_specs
from optimum_neuron.targets.neuron.sdk import devices
from optimum_neuron.targets.neuron.sdk.devices import NeuronDevices
from optimum_neuron.targets.neuron.sdk.hardware import INSTANCES, PARALLEL_SIZES, check_parallel_size, hosts_of
from optimum_neuron.targets.neuron.sharding import shard_plan
from optimum_neuron.tools.estimate.core_sizes import core_sizes
from optimum_neuron.tools.estimate.estimate import EstimateReport, estimate_model
from optimum_neuron.tools.estimate.model_sizes import measure_model
from optimum_neuron.tools.estimate.step_needs import cache_bytes


def test_each_host_takes_what_its_cores_and_its_topology_allow() -> None:
    sizes = {host.name: host.parallel_sizes for host in INSTANCES}
    assert (sizes["inf2.xlarge"], sizes["inf2.48xlarge"]) == ((1, 2), (1, 2, 4, 8, 12, 24))
    assert (sizes["trn1n.32xlarge"], sizes["trn2.3xlarge"]) == ((1, 2, 8, 16, 32), (1, 2, 4))
    assert sizes["trn2.48xlarge"] == sizes["trn3 Gen1 server"] == (1, 2, 4, 8, 16, 32, 64)
    assert [host.name for host in hosts_of("inf2", 8)] == ["inf2.24xlarge", "inf2.48xlarge"]
    assert [host.name for host in hosts_of("inf2", 12)] == ["inf2.24xlarge", "inf2.48xlarge"]
    for target in NEURON_TARGETS:
        for size in PARALLEL_SIZES[target]:
            check_parallel_size(target, size)
            assert hosts_of(target, size)


def test_other_sizes_are_refused_with_the_nearest(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    checkpoint, nearest = tiny_checkpoints["llama"], {
        ("inf2", 16): "inf2 connects, which are 1, 2, 4, 8, 12, 24; use 12 or 24", ("inf2", 25): "use 24",
        ("trn1", 4): "1, 2, 8, 16, 32; use 2 or 8", ("trn3", 48): "use 32 or 64",
    }  # fmt: skip
    for (target, size), told in nearest.items():
        sentence = rf"tensor_parallel_size={size} is no group of cores that .*{told}$"
        with pytest.raises(ValueError, match=sentence):
            export_tiny(checkpoint, tmp_path / "out", target=target, tensor_parallel_size=size)
        with pytest.raises(ValueError, match=sentence):
            estimate_model(str(checkpoint), {"sequence_length": 64}, [target], tensor_parallel_size=size)
    assert not list(tmp_path.iterdir())


def test_a_size_that_some_targets_take_leaves_out_the_others(tiny_checkpoints: dict[str, Path]) -> None:
    targets, sizes = ["inf2", "trn1", "trn2"], {"sequence_length": 64}
    report = estimate_model(str(tiny_checkpoints["llama"]), sizes, targets, tensor_parallel_size=4)
    assert [one.config.target for one in report.estimates] == ["inf2", "trn2"]
    assert any("trn1 connects, which are 1, 2, 8, 16, 32; use 2 or 8." in note for note in report.notes)
    assert [host.name for host in report.estimates[1].hosts] == ["trn2.3xlarge", "trn2.48xlarge", "trn2u.48xlarge"]


def test_auto_is_this_machines_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "find_devices", lambda: NeuronDevices("trn1", 1, 2))
    LlamaConfig(num_hidden_layers=1, max_position_embeddings=4096, dtype="bfloat16").save_pretrained(tmp_path)
    options = {"sequence_length": 4096}
    (one,) = estimate_model(str(tmp_path), options, ["auto", "trn1"], tensor_parallel_size=1).estimates
    assert (one.config.target, one.config.context_buckets) == ("trn1", (256, 1024, 4096))
    for found, told in ((None, "no Neuron device"), (NeuronDevices(None, 1, None), "of an unknown generation")):
        monkeypatch.setattr(devices, "find_devices", lambda found=found: found)
        with pytest.raises(ValueError, match=f"'auto': this machine has .*{told}; name one of inf2"):
            estimate_model(str(tmp_path), {}, ["auto"])
    with pytest.raises(ValueError, match="'cpu' is no Neuron device; name one of inf2"):
        estimate_model(str(tmp_path), {}, ["cpu"])


FORMS: dict[str, dict[str, Any]] = {
    "int4": {"quantization": "int4", "quantization_exclude": ("*.o_proj",)},
    "zero points": {"quantization": "int4", "quantization_zero_point": True, "quantization_group_size": 64},
    "fp8": {"quantization": "fp8"},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_bytes_are_those_that_an_export_writes(form: str, tied: bool, tmp_path: Path) -> None:
    LlamaConfig(**TINY_SIZES, tie_word_embeddings=tied, dtype="bfloat16").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(tmp_path), dtype=torch.bfloat16)
    config = NeuronConfig.from_dict({"target": "trn2", **FORMS[form]})
    expected = formats_of(model, config)
    quantize(model, config)
    assert weight_formats(model) == expected
    distinct = {each.data_ptr(): each for each in named_tensors(model).values()}
    written = sum(each.nbytes for each in distinct.values())
    head = model.get_output_embeddings()
    both = tied and form != "fp8"  # codes that are read by rows and multiplied with lie in both ways
    written += both * head.codes.nbytes
    report = estimate_model(str(tmp_path), {"sequence_length": 64, **FORMS[form]}, ["trn2"], tensor_parallel_size=1)
    # Scales of a head that shares its table are counted once more.
    assert report.estimates[0].memory.weights == written + both * head.scale.nbytes
    plain = estimate_model(str(tmp_path), {"sequence_length": 64}, ["trn2"], tensor_parallel_size=1)
    assert report.sizes.parameters == plain.sizes.parameters
    assert core_sizes(report.sizes, 1).linear_params == core_sizes(plain.sizes, 1).linear_params


@pytest.fixture
def estimated(tmp_path: Path) -> Callable[..., EstimateReport]:
    """Estimate a tiny model in bfloat16."""
    LlamaConfig(**TINY_SIZES, dtype="bfloat16").save_pretrained(tmp_path)

    def estimate(quantization: str, *targets: str, cores: int = 1) -> EstimateReport:
        options = {"sequence_length": 64, "quantization": quantization}
        return estimate_model(str(tmp_path), options, targets or ("trn2",), tensor_parallel_size=cores)

    return estimate


def test_cores_share_codes_as_ranks_do(estimated: Callable[..., EstimateReport], tmp_path: Path) -> None:
    config = LlamaConfig.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)
    quantize(model, NeuronConfig.from_dict({"target": "trn2", "quantization": "int8"}))
    plan = shard_plan(model, 4)
    sizes = [torch.Size(plan.local_shape(name)).numel() * each.itemsize for name, each in named_tensors(model).items()]
    assert estimated("int8", cores=4).estimates[0].memory.weights == sum(sizes) + 4


def test_codes_are_not_known_from_a_config(estimated: Callable[..., EstimateReport], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="its config alone is read here; give the kind of codes"):
        estimated("checkpoint")
    model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(tmp_path), dtype=torch.bfloat16)
    formats = formats_of(model, NeuronConfig.from_dict({"quantization": "int4"}))
    write_formats(formats, tmp_path)  # as an artifact's folder has them
    assert estimated("checkpoint").estimates[0].memory == estimated("int4").estimates[0].memory


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_bytes_of_codes_are_those_of_the_states(kind: str, tmp_path: Path) -> None:
    sizes = measure_model(TINY_CONFIGS["llama"](), "llama", "bfloat16", trust_remote_code=False)
    for cores in (1, 2):
        core, config = core_sizes(sizes, cores), tiny_config(dtype="bfloat16", kv_cache_dtype=kind)
        states = state_specs(config, core.spec)
        assert cache_bytes(core, config) == byte_count(states)
    TINY_CONFIGS["llama"]().save_pretrained(tmp_path)
    options = {"batch_size": 2, "sequence_length": 128, "kv_cache_dtype": kind, "dtype": "bfloat16"}
    report = estimate_model(str(tmp_path), options, ("trn1", "trn2"), tensor_parallel_size=1)
    assert {each.config.target for each in report.estimates} == {"trn1", "trn2"}
    coded = StateSizes.measure(state_specs(tiny_config(dtype="bfloat16", kv_cache_dtype=kind), sizes.spec)).per_token
    core = core_sizes(sizes, 1)
    assert replace(core, cache_has_codes=True).token_bytes == coded < core.token_bytes
