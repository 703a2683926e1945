# SPDX-License-Identifier: Apache-2.0
"""Every form of a checkpoint exports to the weights that transformers loads, or is refused before anything is written."""

from __future__ import annotations

import json
import logging
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import artifact_runner, export_tiny, generate, random_tokens, weights_of
from quantized_files import change_config, change_weights, check_export_refused, quantize_to_fp8, quantize_to_mxfp4
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from optimum_neuron.artifact.artifact import Artifact


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
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


def test_shards_are_put_together(checkpoint: Path, output: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    shard = split_in_shards(checkpoint)[1]
    assert_equal_weights(export_tiny(checkpoint, output), expected)
    assert "model-0" not in (output / INDEX).read_text(encoding="utf-8")  # it is an artifact's own
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{shard.name} is truncated or corrupt"):
        export_tiny(checkpoint, output.with_name("other"))


def store(checkpoint: Path, stored: str, *, tied: bool) -> None:
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
        check_export_refused(f"lacks {missing}, which LlamaForCausalLM needs", checkpoint, output)
        return
    expected = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    artifact = export_tiny(checkpoint, output)
    assert_equal_weights(artifact, expected)
    assert bool(Artifact.open(artifact).tied_weights) is (tied and stored != "both, different")
    told = f"holds {HEAD} and {EMBEDDINGS} with other numbers, and its config says by tie_word_embeddings=true"
    assert (told in caplog.text) is (tied and stored == "both, different")
    assert_same_tokens(artifact, expected)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("asked", "key"),
    [("auto", "dtype"), ("auto", "torch_dtype"), ("auto", None), ("float32", "dtype"), ("bfloat16", None)],
)
def test_weights_have_types_asked(asked: str, key: str | None, stored: str, checkpoint: Path, output: Path) -> None:
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


@pytest.mark.parametrize("value", [5, "nn", "torch.float32"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype", "text_config"])
def test_what_is_no_name_of_a_type_is_refused(key: str, value: Any, checkpoint: Path, output: Path) -> None:
    named = {"text_config": {"dtype": value}} if key == "text_config" else {key: value}
    change_config(checkpoint, drop=() if key == "dtype" else ("dtype",), **named)
    words = rf"config\.json names \w*dtype={re.escape(repr(value))}, which is no type of weights"
    check_export_refused(words, checkpoint, output, dtype="auto")


def test_pickled_weights_are_never_opened(checkpoint: Path, output: Path) -> None:
    (checkpoint / WEIGHTS).unlink()

    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (output.parent.parent / "opened",))

    (checkpoint / "pytorch_model.bin").write_bytes(pickle.dumps(Hostile()))
    words = r"holds its weights as pytorch_model.bin, a format that may run code; convert it to model.safetensors"
    check_export_refused(words, checkpoint, output)
    assert not (output.parent.parent / "opened").exists()


def drop_from_shard(checkpoint: Path) -> None:
    shard = split_in_shards(checkpoint)[1]
    tensors = load_file(shard)
    del tensors[min(tensors)]
    save_file(tensors, shard, metadata={"format": "pt"})


def store_twice(checkpoint: Path) -> None:
    first, second, *_ = split_in_shards(checkpoint)
    save_file(load_file(second) | load_file(first), second, metadata={"format": "pt"})


def quantize_unreadably(checkpoint: Path) -> None:
    """Without weights: the method is refused before they are looked for."""
    change_config(checkpoint, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True})
    (checkpoint / WEIGHTS).unlink()


UP = "model.layers.1.mlp.up_proj.weight"
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda checkpoint: change_weights(checkpoint, lambda tensors: tensors.pop(UP)),
        f"checkpoint lacks {UP}, which LlamaForCausalLM needs; download"),
    "only in the index": (drop_from_shard, r"lacks \S+weight"),
    "in two files": (store_twice, r"holds \S+ twice, in model-0000\S+ and another"),
    "a type that no artifact has": (lambda checkpoint: change_config(checkpoint, dtype="float64"), r"dtype='float64' .*float32"),
    "an unknown program": (lambda checkpoint: change_weights(checkpoint, lambda tensors: [
        tensors.update({f"actor.{name}": tensors.pop(name)}) for name in list(tensors)]),
        r"lacks lm_head\.weight, .* and holds actor\.lm_head\.weight, .* without a place"),
    **{name: (lambda checkpoint, name=name: change_weights(checkpoint, lambda tensors: tensors.update({name: torch.zeros(64)})),
        r"holds \S*norm\.weight and \S*norm\.weight, which are one tensor of its model; remove one")
        for name in ("norm.weight", "_orig_mod.model.norm.weight")},
    "bitsandbytes": (quantize_unreadably, r"is quantized by bitsandbytes, which is not read; export the checkpoint that it was made from"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_checkpoint_that_is_not_whole_is_refused_by_name(kind: str, checkpoint: Path, output: Path) -> None:
    change, words = REFUSED[kind]
    change(checkpoint)
    check_export_refused(words, checkpoint, output, dtype="auto")


FREQUENCIES = 1e4 ** -torch.linspace(0, 1, 9)[:-1]
MASK = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model.layers.0.self_attn.q_proj.bias", torch.ones(64)),
        ("model.layers.2.mlp.up_proj.weight", torch.ones(96, 64)),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", FREQUENCIES / 2),
        ("model.rotary_emb.inv_freq", FREQUENCIES.roll(1)), ("model.layers.0.self_attn.bias", torch.ones(64)),
        ("model.position_ids", torch.arange(8).flip(0)), ("model.layers.0.self_attn.q_scale", torch.ones(4)),
        ("rope_freqs", torch.ones(8)),
    ],
)  # fmt: skip
def test_a_tensor_without_a_place_is_refused_by_name(
    name: str, tensor: Tensor, checkpoint: Path, output: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change_weights(checkpoint, lambda tensors: tensors.update({name: tensor}))
    logging.getLogger("transformers").propagate = True
    words = rf"holds {re.escape(name)}, for which LlamaForCausalLM has no place by its config\.json"
    check_export_refused(words, checkpoint, output)
    assert "LOAD REPORT" not in caplog.text


@pytest.mark.parametrize(
    "wrapped", ["module._orig_mod.{}", "_orig_mod.module.{}", "_fsdp_wrapped_module.{}", "compiled layers"]
)
def test_tensors_that_no_logit_needs_are_left_out_and_names_of_wrappers_of_training_are_taken_off(
    wrapped: str, checkpoint: Path, output: Path
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors |= {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": FREQUENCIES.half() for layer in (0, 1)}
        tensors |= {"model.layers.0.attn.bias": MASK, "model.layers.0.attn.masked_bias": torch.tensor(-1e9)}
        tensors |= {"model.position_ids": torch.arange(8)[None], "mtp.layers.0.mlp.up_proj.weight": torch.ones(3)}
        further = {"eh_proj.weight": torch.ones(64, 128), "mlp.up_proj.weight": torch.ones(96, 64)}
        tensors |= {f"model.layers.2.{own}": tensor for own, tensor in further.items()}
        tensors |= {"visual.blocks.0.attn.proj.bias": torch.ones(3), "v_head.summary.weight": torch.ones(1, 64)}
        tensors |= {"model.layers.0.mlp.down_proj.bias": torch.zeros(64)}
        tensors |= {"model.layers.1.self_attn.k_scale": torch.ones(1), "model.norm._extra_state": torch.ones(0)}
        for name in list(tensors):
            layer = re.sub(r"(layers\.\d+\.)(?=\w+_layernorm)", r"\1_orig_mod.", name)
            tensors[layer if wrapped == "compiled layers" else wrapped.format(name)] = tensors.pop(name)

    expected = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    change_weights(checkpoint, change)
    assert_equal_weights(export_tiny(checkpoint, output), expected)


@pytest.mark.parametrize(
    ("name", "quantize", "way", "dtype"),
    [
        *(("llama", quantize_to_fp8, FineGrainedFP8Config, dtype) for dtype in ("float32", "bfloat16")),
        ("gpt_oss", quantize_to_mxfp4, Mxfp4Config, "bfloat16"),
    ],
)
def test_codes_that_transformers_reads_are_multiplied_by_their_scales(
    name: str, quantize: Any, way: Any, dtype: str, tiny_checkpoints: dict[str, Path], tmp_path: Path, output: Path
) -> None:
    checkpoint = Path(shutil.copytree(tiny_checkpoints[name], tmp_path / name))
    exact, as_asked = quantize(checkpoint), getattr(torch, dtype)
    artifact = export_tiny(checkpoint, output, dtype=dtype, dequantize=True)
    found = weights_of(Artifact.open(artifact))
    assert all(torch.equal(found[f"model.{name}"], tensor.to(as_asked)) for name, tensor in exact.items())
    assert "quantization_config" not in json.loads((artifact / "config.json").read_text(encoding="utf-8"))
    options = {"dtype": as_asked, "quantization_config": way(dequantize=True)}
    expected = AutoModelForCausalLM.from_pretrained(checkpoint, **options)
    for parameter in expected.parameters():  # not every version of transformers heeds dtype here
        parameter.data = parameter.to(as_asked)
    assert_equal_weights(artifact, expected)
