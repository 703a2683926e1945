# SPDX-License-Identifier: Apache-2.0
"""NeuronConfig completes itself, survives JSON, and refuses what no graph could honor."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pickle
import re
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optimum.commands.register.neuron_options import add_declared, read_declared

from optimum_neuron import NeuronModelForCausalLM, export_model
from optimum_neuron.config import DTYPES, NEURON_TARGETS, TARGETS, ExportOptions, NeuronConfig
from optimum_neuron.config.option import Options
from optimum_neuron.export.first_use import option_words
from optimum_neuron.step.spec import graph_specs


SIZE_OPTIONS = ("batch_size", "sequence_length", "prefill_chunk_size", "ctx_batch_size", "tensor_parallel_size")


@st.composite
def valid_options(draw: st.DrawFn) -> dict[str, Any]:
    batch_size = draw(st.integers(1, 16))
    ctx_batch_size = draw(st.integers(1, batch_size))
    chunk = draw(st.integers(1, 600))
    sequence_length = batch_size + ctx_batch_size * chunk + draw(st.integers(0, 3000))
    buckets = sorted(draw(st.sets(st.integers(1, sequence_length - 1), max_size=4))) if sequence_length > 1 else []
    smaller = sorted(draw(st.sets(st.integers(1, chunk - 1), max_size=3))) if chunk > 1 else []
    changes: dict[str, Any] = {"prefill_chunk_size": chunk, "prefill_chunk_buckets": tuple(smaller)} if smaller else {}
    if draw(st.booleans()):
        block = draw(st.sampled_from([64, 128, 256]))
        sequence_length = -(-sequence_length // block) * block
        buckets = sorted({-(-bucket // block) * block for bucket in buckets} - {sequence_length})
        most = draw(st.sampled_from([None, sequence_length + block * draw(st.integers(0, 50))]))
        changes |= {"kv_block_size": block, "kv_cache_tokens": most}
    switches = {name: draw(st.booleans()) for name in ("on_device_sampling", "output_logits", "prompt_logits")}
    sizes = {"batch_size": batch_size, "sequence_length": sequence_length, "ctx_batch_size": ctx_batch_size}
    options = {
        "prefill_chunk_size": draw(st.sampled_from([chunk, None])),
        "prefill_chunk_buckets": (),
        "context_buckets": draw(st.sampled_from([None, (*buckets, sequence_length)])),
        "dtype": draw(st.sampled_from(DTYPES)),
        "tensor_parallel_size": draw(st.integers(1, 64)),
        "target": draw(st.sampled_from(TARGETS)),
    }
    return sizes | switches | options | changes


def test_defaults_are_complete() -> None:
    derived = {"prefill_chunk_size": 512, "mixed_step": False, "context_buckets": [1024]}
    derived |= {"prefill_chunk_buckets": [], "kernels": []}
    declared = {name: option.default for name, option in NeuronConfig.declared().items()}
    assert NeuronConfig().to_dict() == declared | derived
    assert (declared["batch_size"], declared["sequence_length"], declared["target"]) == (1, 1024, "auto")


@pytest.mark.parametrize(
    ("options", "chunk", "buckets"),
    [
        ({"sequence_length": 2}, 1, (2,)),
        ({"sequence_length": 64, "batch_size": 4}, 32, (64,)),
        ({"sequence_length": 4096, "batch_size": 4, "ctx_batch_size": 4}, 512, (4096,)),
        ({"sequence_length": 4096, "target": "trn2"}, 512, (256, 1024, 4096)),
        ({"sequence_length": 1000, "target": "inf2"}, 512, (1000,)),
        ({"sequence_length": 1000, "batch_size": 4, "ctx_batch_size": 4}, 128, (1000,)),
        ({"sequence_length": 1028, "batch_size": 8, "target": "trn1"}, 512, (257, 1028)),
    ],
)
def test_derived_sizes_follow_from_named_ones(options: dict[str, Any], chunk: int, buckets: tuple[int, ...]) -> None:
    config = NeuronConfig(**options)
    assert (config.prefill_chunk_size, config.context_buckets) == (chunk, buckets)


@given(valid_options())
def test_a_valid_config_survives_json_and_its_own_command_line(options: dict[str, Any]) -> None:
    config = NeuronConfig(**options)
    again = NeuronConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config and hash(again) == hash(config)
    assert all(getattr(config, name) == value for name, value in options.items() if value is not None)
    parser = ArgumentParser()
    for group in {option.group for option in NeuronConfig.declared().values()}:
        add_declared(parser, [each for each in NeuronConfig.declared().values() if each.group == group])
    assert NeuronConfig.from_dict(read_declared(parser.parse_args(option_words(config)), NeuronConfig)) == config


@given(valid_options())
def test_every_valid_config_serves_every_length_with_distinct_graphs_and_blocks(options: dict[str, Any]) -> None:
    """Blocks hold a request of full length, and those for trash a whole step."""
    config = NeuronConfig(**options)
    assert config.kv_blocks >= config.blocks_per_row == config.sequence_length // config.block_length
    step = config.batch_size + config.ctx_batch_size * config.prefill_chunk_size
    assert config.trash_blocks * config.block_length >= step > (config.trash_blocks - 1) * config.block_length
    graphs = graph_specs(config)
    assert len({graph.name for graph in graphs}) == len(graphs)
    for kind, chunks in (("token_generation", (0,)), ("chunked_prefill", config.chunk_sizes)):
        of_kind = [graph for graph in graphs if graph.kind == kind]
        assert {each.chunk_size for each in of_kind if each.context_length == config.sequence_length} == set(chunks)
    assert all(graph.chunk_size <= graph.context_length for graph in graphs)


def test_a_config_cannot_be_changed_and_freezes_copies_of_lists() -> None:
    buckets = [256, 1024]
    config = NeuronConfig(context_buckets=buckets, target="trn2", kernels=iter(["attention_cte"]))  # type: ignore[arg-type]
    buckets.append(4096)
    assert config.context_buckets == (256, 1024) and config.kernels == ("attention_cte",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.batch_size = 2  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        NeuronConfig(2)  # type: ignore[misc]


def test_sizes_that_nobody_asked_for_follow_a_changed_target() -> None:
    config = NeuronConfig(sequence_length=4096)
    assert config.context_buckets == (4096,)
    found = dataclasses.replace(config, target="trn2")
    assert found == NeuronConfig(sequence_length=4096, target="trn2")
    assert found.context_buckets == (256, 1024, 4096)
    assert dataclasses.replace(found, target="cpu").context_buckets == (4096,)
    assert dataclasses.replace(pickle.loads(pickle.dumps(config)), target="trn2") == found
    assert dataclasses.replace(found, sequence_length=1024).context_buckets == (256, 1024)
    asked = NeuronConfig(sequence_length=4096, context_buckets=(4096,))
    for fixed in (asked, NeuronConfig.from_dict(json.loads(json.dumps(config.to_dict())))):
        assert dataclasses.replace(fixed, target="trn2").context_buckets == (4096,)


def test_an_unknown_option_names_the_one_that_was_meant_or_all() -> None:
    for name, told in (("batchsize", "did you mean 'batch_size'"), ("zzz", "the options are batch_size, .*target")):
        with pytest.raises(TypeError, match=f"unknown option '{name}' = 4; {told}"):
            NeuronConfig.from_dict({name: 4})


@pytest.mark.parametrize("name", SIZE_OPTIONS)
def test_sizes_that_are_no_whole_numbers_in_reach_are_refused(name: str) -> None:
    beyond = f"is above {2**31 - 1}, as far as graphs count; lower it"
    for value, told in ((0, "must be at least 1"), (-1, "must be at least 1"), (2**40, beyond)):
        with pytest.raises(ValueError, match=f"{name}={value} {told}"):
            NeuronConfig(**{name: value})
    for other in (True, "8", 8.0, *([None] if name != "prefill_chunk_size" else [])):
        with pytest.raises(TypeError, match=f"{name} must be a whole number, not {other!r}"):
            NeuronConfig(**{name: other})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["prefill_chunk_buckets", "context_buckets"])
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("256", TypeError, "must be a list of whole numbers, not '256'"),
        (256, TypeError, "must be a list of whole numbers, not 256"),
        ((0, 1024), ValueError, "=0 must be at least 1"),
        ((True, 1024), TypeError, "must be a whole number, not True"),
        ((256, 64, 1024), ValueError, "ascend without repetition; sort it as (64, 256, 1024)"),
        ((256, 256, 1024), ValueError, "ascend without repetition; sort it as (256, 1024)"),
    ],
)
def test_bad_buckets_are_refused(name: str, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        NeuronConfig(**{name: value})
    assert name in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_logprobs": True}, "top_logprobs must be a whole number, not True"),
        ({"state_snapshots": "4"}, "state_snapshots must be a whole number, not '4'"),
        ({"prompt_logits": None}, "prompt_logits must be true or false, not None"),
        ({"quantization_zero_point": 1}, "quantization_zero_point must be true or false, not 1"),
        *(({"quantization": "int8", "quantization_exclude": each}, "must be a list of patterns") for each in ("lm_head", [3], [""])),
    ],
)  # fmt: skip
def test_values_of_another_type_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        NeuronConfig(**options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sequence_length": 256, "prefill_chunk_size": 300}, ["prefill_chunk_size=300", "sequence_length=256"]),
        ({"batch_size": 4, "ctx_batch_size": 2, "sequence_length": 67, "prefill_chunk_size": 32}, ["4 + 2 * 32 = 68", "=67"]),
        ({"batch_size": 64, "sequence_length": 64}, ["batch_size=64", "sequence_length=64"]),
        ({"batch_size": 2, "ctx_batch_size": 3}, ["ctx_batch_size=3", "batch_size=2"]),
        ({"prefill_chunk_size": 64, "prefill_chunk_buckets": (16, 64)}, ["buckets=(16, 64)", "prefill_chunk_size=64"]),
        ({"context_buckets": (256, 512)}, ["context_buckets=(256, 512)", "sequence_length=1024"]),
        ({"context_buckets": ()}, ["context_buckets=()", "sequence_length=1024"]),
        ({"kv_cache_tokens": 4096}, ["kv_cache_tokens=4096", "kv_block_size"]),
        ({"kv_block_size": 32}, ["kv_block_size=32", "64"]),
        ({"kv_block_size": 192}, ["kv_block_size=192", "power of two"]),
        ({"kv_block_size": 128, "sequence_length": 1000}, ["sequence_length=1000", "kv_block_size=128", "1024"]),
        ({"kv_block_size": 128, "kv_cache_tokens": 896}, ["kv_cache_tokens=896", "sequence_length=1024"]),
        ({"kv_block_size": 128, "kv_cache_tokens": 1100}, ["kv_cache_tokens=1100", "kv_block_size=128", "1152"]),
        ({"kv_block_size": 128, "context_buckets": (200, 1024)}, ["(200, 1024)", "kv_block_size=128", "[200]"]),
        ({"state_snapshots": -1}, ["state_snapshots=-1", "at least 0"]),
        ({"state_snapshot_interval": 0}, ["state_snapshot_interval=0", "at least 1"]),
        ({"state_snapshot_interval": 64, "target": "hlo"}, ["state_snapshot_interval=64", "target='hlo'", "give both"]),
        ({"state_snapshot_interval": 64, "state_snapshots": 0}, ["state_snapshot_interval=64", "state_snapshots=0"]),
        ({"float32_reduce": True}, ["float32_reduce=True", "tensor_parallel_size=2 or more"]),
        ({"top_logprobs": 21}, ["top_logprobs=21 must be between 0 and 20"]),
        ({"top_logprobs": -1}, ["top_logprobs=-1 must be between 0 and 20"]),
        ({"top_logprobs": 0, "on_device_sampling": False}, ["top_logprobs=0 describes tokens that the graphs choose"]),
        ({"quantization": "int3"}, ["quantization='int3' is not known; choose one of int8, int4, fp8"]),
        ({"quantization": "int4", "quantization_group_size": 48}, ["quantization_group_size=48 is not known"]),
        ({"quantization": "int8", "quantization_group_size": 32}, ["group_size=32 needs quantization='int4'"]),
        ({"quantization": "fp8", "quantization_zero_point": True}, ["zero_point=True needs quantization='int4'"]),
        ({"quantization_zero_point": True}, ["quantization is left out"]),
        ({"dtype": "int8"}, ["dtype='int8'", *DTYPES]),
        ({"kv_cache_dtype": "int4"}, ["kv_cache_dtype='int4'", "int8, fp8"]),
        ({"kv_cache_dtype": "int8", "kernels": ("moe_tkg", "attention_cte")}, ["dtype='int8'", "kernels=('attention_cte',)"]),
        ({"target": "trn9"}, ["target='trn9'", "cpu", *NEURON_TARGETS]),
    ],
)  # fmt: skip
def test_values_that_contradict_each_other_are_both_named(options: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        NeuronConfig(**options)
    assert [text for text in named if text not in str(caught.value)] == []


def test_there_are_two_snapshots_for_each_row_and_none_in_devices() -> None:
    for target, options, places in (("cpu", {}, 6), ("eager", {"state_snapshots": 7}, 7), ("trn2", {}, 0)):
        assert NeuronConfig(batch_size=3, target=target, **options).state_places == places


@pytest.mark.parametrize(
    ("options", "returned"),
    [
        ({}, False), ({"output_logits": True}, True), ({"on_device_sampling": False}, True),
        ({"top_logprobs": 3, "target": "cpu"}, True), ({"top_logprobs": 3, "target": "trn2"}, False),
    ],
)  # fmt: skip
def test_decode_logits_are_returned_where_needed(options: dict[str, Any], returned: bool) -> None:
    assert NeuronConfig(**options).returns_decode_logits is returned


def test_a_step_that_just_fits_is_accepted_and_without_blocks_each_row_has_one() -> None:
    NeuronConfig(batch_size=4, ctx_batch_size=2, sequence_length=68, prefill_chunk_size=32)
    config = NeuronConfig(batch_size=4, sequence_length=100, prefill_chunk_size=32)
    assert (config.kv_blocks, config.block_length, config.blocks_per_row, config.trash_blocks) == (4, 100, 1, 1)


@pytest.mark.parametrize("options", [NeuronConfig, ExportOptions])
def test_every_option_is_declared_once_and_documented_from_there(options: type[Options]) -> None:
    for name, option in options.declared().items():
        assert option.help and not option.help.endswith(".")
        assert f"        {name}: {option.help.split()[0]}" in str(options.__doc__)
        for other in re.findall(r"`(\w+)`", option.help):
            assert other in NeuronConfig.option_names() + ExportOptions.option_names()


@pytest.mark.parametrize(
    ("name", "value"), [("adapter", "x"), ("dequantize", True), ("quantization_calibration", Path("text"))]
)
def test_an_option_that_changes_an_export_is_refused_for_an_artifact(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}=.*{value}.* is an option of an export, and m is an artifact"):
        ExportOptions(**{name: value}).refuse_for_artifact("m")
    ExportOptions(revision="v1", token="t", trust_remote_code=True).refuse_for_artifact("m")


def test_options_of_an_export_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="task='fill-mask' is not supported; choose one of text-generation"):
        ExportOptions(task="fill-mask")
    for name, words in (("adaptor", "did you mean 'adapter'?"), ("batch_size", "the options are revision, .*task")):
        with pytest.raises(TypeError, match=f"unknown option '{name}' = 2; {words}"):
            export_model("m", tmp_path / "out", **{name: 2})


@pytest.mark.parametrize("function", [export_model, NeuronModelForCausalLM.from_pretrained])
def test_help_of_a_function_lists_the_options_that_it_takes(function: Any) -> None:
    parameters, options = inspect.signature(function).parameters, ExportOptions.declared()
    for name, option in (options if function is export_model else options | NeuronConfig.declared()).items():
        assert parameters[name].default == option.default and parameters[name].annotation
