# SPDX-License-Identifier: Apache-2.0
"""Every form of a checkpoint exports to the weights that transformers loads, or is refused before anything is written."""

from __future__ import annotations

import json
import logging
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import artifact_runner, export_tiny, generate, random_tokens, weights_of
from quantized_files import change_config, change_weights, quantize_to_fp8, quantize_to_mxfp4
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.checkpoints.files import read_object
from optimum_neuron.checkpoints.quantized import open_quantized


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A tiny Llama that a test may change."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out" / "artifact"


def split_in_shards(checkpoint: Path) -> list[Path]:
    AutoModelForCausalLM.from_pretrained(checkpoint).save_pretrained(checkpoint, max_shard_size="100KB")
    (checkpoint / WEIGHTS).unlink(missing_ok=True)
    shards = sorted(checkpoint.glob("model-*.safetensors"))
    assert len(shards) > 2 and (checkpoint / INDEX).is_file()
    return shards


def assert_equal_weights(artifact: Path, model: Any) -> None:
    """All of an artifact's weights are a transformers model's, to the bit and in the same type."""
    found = weights_of(Artifact.open(artifact))
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        assert found[f"model.{name}"].dtype == tensor.dtype, name
        assert torch.equal(found[f"model.{name}"], tensor), name


def assert_same_tokens(artifact: Path, model: Any) -> None:
    prompt = random_tokens(20)
    tokens, logits = generate(artifact_runner(artifact), prompt, 5)
    ids = torch.tensor([[*prompt.tolist(), *tokens]])
    expected = model(input_ids=ids, use_cache=False).logits[0, 19:-1]
    assert tokens == expected.argmax(-1).tolist()
    torch.testing.assert_close(logits, expected.float(), atol=2e-6, rtol=0)


def refused(error: type[Exception], words: str, checkpoint: Path, output: Path, **changes: Any) -> None:
    with pytest.raises(error, match=words) as caught:
        export_tiny(checkpoint, output, **changes)
    assert "\n" not in str(caught.value)
    assert not output.parent.exists()


def test_shards_are_put_together(checkpoint: Path, output: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    split_in_shards(checkpoint)
    assert_equal_weights(export_tiny(checkpoint, output), expected)
    assert "model-0" not in (output / INDEX).read_text(encoding="utf-8")  # it is an artifact's own


def store(checkpoint: Path, stored: str, *, tied: bool) -> None:
    """Leaves embeddings, head or both in a checkpoint."""

    def change(tensors: dict[str, Tensor]) -> None:
        if stored == "embeddings":
            del tensors[HEAD]
        if stored == "head":
            tensors[HEAD] = tensors.pop(EMBEDDINGS)
        if stored == "both, equal":
            tensors[HEAD] = tensors[EMBEDDINGS].clone()

    change_config(checkpoint, tie_word_embeddings=tied)
    change_weights(checkpoint, change)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stored", ["embeddings", "head", "both, equal", "both, different"])
def test_embeddings_and_head_are_tied_as_transformers_ties_them(
    stored: str, tied: bool, checkpoint: Path, output: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store(checkpoint, stored, tied=tied)
    if not tied and stored in ("embeddings", "head"):
        missing = HEAD if stored == "embeddings" else EMBEDDINGS
        refused(ValueError, f"lacks {missing}, which LlamaForCausalLM needs", checkpoint, output)
        return
    expected = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    artifact = export_tiny(checkpoint, output)
    assert_equal_weights(artifact, expected)
    assert bool(Artifact.open(artifact).tied_weights) is (tied and stored != "both, different")
    told = f"holds {HEAD} and {EMBEDDINGS} with other numbers, and its config says by tie_word_embeddings=true"
    assert (told in caplog.text) is (tied and stored == "both, different")
    assert_same_tokens(artifact, expected)


@pytest.mark.slow
def test_compiled_graphs_follow_the_weights_where_the_config_ties_them_wrongly(checkpoint: Path, output: Path) -> None:
    store(checkpoint, "both, different", tied=True)
    expected = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert_same_tokens(export_tiny(checkpoint, output, target="cpu", mixed_step=False), expected)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype", None])
@pytest.mark.parametrize("asked", ["auto", "float32", "bfloat16", "float16"])
def test_weights_have_the_type_that_was_asked_for_or_the_checkpoint_s(
    asked: str, key: str | None, stored: str, checkpoint: Path, output: Path
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            tensors[name] = tensors[name].to(getattr(torch, stored))

    change_weights(checkpoint, change)
    change_config(checkpoint, drop=("dtype",))
    if key is not None:
        change_config(checkpoint, **{key: stored})
    wanted = stored if asked == "auto" else asked
    expected = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, wanted))
    artifact = export_tiny(checkpoint, output, dtype=asked)
    assert Artifact.open(artifact).config.dtype == wanted
    assert_equal_weights(artifact, expected)


def test_a_type_that_cannot_be_exported_is_refused(checkpoint: Path, output: Path) -> None:
    change_config(checkpoint, dtype="float64")
    refused(ValueError, r"dtype='float64' .*float32", checkpoint, output, dtype="auto")


@pytest.mark.parametrize("value", [5, True, [], {}, "nonesuch", "nn", "Tensor", "", "torch.float32", "__name__"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype", "text_config"])
def test_what_is_no_name_of_a_type_is_refused(key: str, value: Any, checkpoint: Path, output: Path) -> None:
    named = {"text_config": {"dtype": value}} if key == "text_config" else {key: value}
    change_config(checkpoint, drop=() if key == "dtype" else ("dtype",), **named)
    words = rf"config\.json names \w*dtype={re.escape(repr(value))}, which is no type of weights"
    refused(ValueError, words, checkpoint, output, dtype="auto")


def test_pickled_weights_are_never_opened(checkpoint: Path, output: Path) -> None:
    (checkpoint / WEIGHTS).unlink()

    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (output.parent.parent / "opened",))

    (checkpoint / "pytorch_model.bin").write_bytes(pickle.dumps(Hostile()))
    words = r"holds its weights as pytorch_model.bin, a format that may run code; convert it to model.safetensors"
    refused(ValueError, words, checkpoint, output)
    assert not (output.parent.parent / "opened").exists()


@pytest.mark.parametrize("kind", ["missing shard", "truncated shard", "truncated", "corrupt", "index", "outside"])
def test_damaged_files_of_weights_are_refused_by_name(kind: str, checkpoint: Path, output: Path) -> None:
    path = checkpoint / WEIGHTS
    words = r"model.safetensors is truncated or corrupt \([\d,]+ bytes: "
    error: type[Exception] = ValueError
    if kind in ("missing shard", "truncated shard"):
        path = split_in_shards(checkpoint)[1]
        words = rf"{path.name} is truncated or corrupt"
    if kind == "missing shard":
        path.unlink()
        error, words = FileNotFoundError, rf"checkpoint lacks {path.name}, which model.safetensors.index.json names"
    elif kind == "corrupt":
        path.write_bytes(b"\xff" * 100)
    elif kind.startswith("truncated"):
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
        names = {"index": {}, "outside": {"weight_map": {"x": "../outside.safetensors"}}}
        (checkpoint / INDEX).write_text(json.dumps(names[kind]), encoding="utf-8")
        words = {"index": r"is no index of weights", "outside": r"names '\.\./outside\.safetensors'"}[kind]
    refused(error, words, checkpoint, output)


def test_a_tensor_that_is_missing_is_not_made_up(checkpoint: Path, output: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(checkpoint, lambda tensors: tensors.__delitem__(name))
    words = (
        rf"checkpoint lacks {name}, which LlamaForCausalLM needs; download the checkpoint again, or correct its config"
    )
    refused(ValueError, words, checkpoint, output)


def test_a_tensor_that_only_the_index_knows_is_not_made_up(checkpoint: Path, output: Path) -> None:
    shard = split_in_shards(checkpoint)[1]
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, shard, metadata={"format": "pt"})
    refused(ValueError, rf"lacks {name}", checkpoint, output)


def test_a_tensor_that_two_files_hold_is_refused(checkpoint: Path, output: Path) -> None:
    first, second, *_ = split_in_shards(checkpoint)
    save_file(load_file(second) | load_file(first), second, metadata={"format": "pt"})
    refused(ValueError, rf"holds {min(load_file(first))} twice, in {second.name} and another file", checkpoint, output)


def test_more_layers_than_the_checkpoint_holds_are_not_made_up(checkpoint: Path, output: Path) -> None:
    change_config(checkpoint, num_hidden_layers=3, layer_types=None)
    words = r"lacks model\.layers\.2\.input_layernorm\.weight, .* and 6 more tensors, which LlamaForCausalLM needs"
    refused(ValueError, words, checkpoint, output)


def test_a_tensor_of_another_shape_is_refused_with_both_shapes(checkpoint: Path, output: Path) -> None:
    change_config(checkpoint, intermediate_size=128)
    words = r"model\.layers\.0\.mlp\.down_proj\.weight has the shape \[64, 96\], .* LlamaForCausalLM needs \[64, 128\]"
    refused(ValueError, words, checkpoint, output)


FREQUENCIES = 1e4 ** -torch.linspace(0, 1, 9)[:-1]
MASK = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model.layers.0.self_attn.q_proj.bias", torch.ones(64)),
        ("model.layers.2.mlp.up_proj.weight", torch.ones(96, 64)),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", FREQUENCIES / 2),
        ("model.rotary_emb.inv_freq", FREQUENCIES.roll(1)),
        ("model.layers.0.self_attn.bias", torch.ones(64)),
        ("model.position_ids", torch.arange(8).flip(0)),
        ("model.layers.0.self_attn.q_scale", torch.ones(4)),
        ("rope_freqs", torch.ones(8)),
    ],
)
def test_a_tensor_without_a_place_is_refused_by_name(
    name: str, tensor: Tensor, checkpoint: Path, output: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change_weights(checkpoint, lambda tensors: tensors.update({name: tensor}))
    logging.getLogger("transformers").propagate = True
    words = rf"holds {re.escape(name)}, for which LlamaForCausalLM has no place by its config\.json"
    refused(ValueError, words, checkpoint, output)
    assert "LOAD REPORT" not in caplog.text


def test_tensors_that_are_computed_or_that_no_logit_needs_are_left_out(checkpoint: Path, output: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors |= {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": FREQUENCIES.half() for layer in (0, 1)}
        tensors |= {"model.layers.0.attn.bias": MASK, "model.layers.0.attn.masked_bias": torch.tensor(-1e9)}
        tensors |= {"model.position_ids": torch.arange(8)[None], "mtp.layers.0.mlp.up_proj.weight": torch.ones(3)}
        further = {"eh_proj.weight": torch.ones(64, 128), "mlp.up_proj.weight": torch.ones(96, 64)}
        tensors |= {f"model.layers.2.{own}": tensor for own, tensor in further.items()}
        tensors |= {"visual.blocks.0.attn.proj.bias": torch.ones(3), "v_head.summary.weight": torch.ones(1, 64)}
        tensors |= {"model.layers.0.mlp.down_proj.bias": torch.zeros(64)}
        tensors |= {"model.layers.1.self_attn.k_scale": torch.ones(1), "model.norm._extra_state": torch.ones(0)}

    expected = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    change_weights(checkpoint, change)
    assert_equal_weights(export_tiny(checkpoint, output), expected)


@pytest.mark.parametrize(
    "wrapped",
    [
        "_orig_mod.{}",
        "module.{}",
        "module._orig_mod.{}",
        "_orig_mod.module.{}",
        "_fsdp_wrapped_module.{}",
        "compiled layers",
    ],
)
def test_names_of_wrappers_of_training_are_taken_off(wrapped: str, checkpoint: Path, output: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            layer = re.sub(r"(layers\.\d+\.)", r"\1_orig_mod.", name)
            tensors[layer if wrapped == "compiled layers" else wrapped.format(name)] = tensors.pop(name)

    expected = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    change_weights(checkpoint, change)
    assert_equal_weights(export_tiny(checkpoint, output), expected)


@pytest.mark.parametrize("name", ["norm.weight", "_orig_mod.model.norm.weight"])
def test_two_names_of_one_tensor_are_refused(name: str, checkpoint: Path, output: Path) -> None:
    change_weights(checkpoint, lambda tensors: tensors.update({name: torch.zeros(64)}))
    words = r"holds \S*norm\.weight and \S*norm\.weight, which are one tensor of its model; remove one of them"
    refused(ValueError, words, checkpoint, output)


def test_names_of_an_unknown_program_are_shown_beside_the_model_s(checkpoint: Path, output: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[f"actor.{name}"] = tensors.pop(name)

    change_weights(checkpoint, change)
    refused(
        ValueError,
        r"lacks lm_head\.weight, .* and holds actor\.lm_head\.weight, .* without a place",
        checkpoint,
        output,
    )


def test_quantized_weights_that_are_not_read_are_refused_before_they_are_looked_for(
    checkpoint: Path, output: Path
) -> None:
    change_config(checkpoint, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    (checkpoint / WEIGHTS).unlink()
    words = r"checkpoint is quantized by bitsandbytes, which is not read; export the checkpoint that it was made from"
    refused(ValueError, words, checkpoint, output)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fp8_weights_are_multiplied_by_their_scales(dtype: str, checkpoint: Path, output: Path) -> None:
    exact = quantize_to_fp8(checkpoint)
    artifact = export_tiny(checkpoint, output, dtype=dtype, dequantize=True)
    found = weights_of(Artifact.open(artifact))
    for name, tensor in exact.items():
        assert torch.equal(found[f"model.{name}"], tensor.to(getattr(torch, dtype))), name
    assert "quantization_config" not in json.loads((artifact / "config.json").read_text(encoding="utf-8"))
    expected = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=getattr(torch, dtype), quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    for parameter in expected.parameters():  # not every version of transformers heeds dtype here
        parameter.data = parameter.to(getattr(torch, dtype))
    assert_equal_weights(artifact, expected)


def test_fp8_weights_are_kept_as_those_that_transformers_dequantizes(checkpoint: Path) -> None:
    exact = quantize_to_fp8(checkpoint)
    found = open_quantized(read_object(checkpoint / "config.json"), checkpoint, "tiny")
    assert found.layers and {*found.layers, *found.plain} == exact.keys()
    assert all(torch.equal(found.read_codes(name).dequantize(), exact[name]) for name in found.layers)
    assert all(torch.equal(found.read_plain(name), exact[name]) for name in found.plain)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_experts_are_multiplied_by_their_scales(
    dtype: str, tiny_checkpoints: dict[str, Path], tmp_path: Path, output: Path
) -> None:
    checkpoint = Path(shutil.copytree(tiny_checkpoints["gpt_oss"], tmp_path / "gpt_oss"))
    exact = quantize_to_mxfp4(checkpoint)
    kept = open_quantized(read_object(checkpoint / "config.json"), checkpoint, "tiny")
    assert {*kept.layers} == exact.keys()
    assert all(torch.equal(kept.read_codes(name).dequantize().transpose(1, 2), exact[name]) for name in kept.layers)
    artifact = export_tiny(checkpoint, output, dtype=dtype, dequantize=True)
    found = weights_of(Artifact.open(artifact))
    assert exact
    for name, tensor in exact.items():
        assert torch.equal(found[f"model.{name}"], tensor.to(getattr(torch, dtype))), name
    expected = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    )
    assert torch.equal(found[f"model.{name}"].bfloat16(), expected.state_dict()[name])
    assert len(generate(artifact_runner(artifact), random_tokens(9), 3)[0]) == 3
