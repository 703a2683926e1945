# SPDX-License-Identifier: Apache-2.0
"""Multimodal checkpoints: the language model is exported with the very weights of the whole, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from adapting import ATTENTION, export, lora
from helpers import export_tiny, random_tokens
from quantized_files import change_config, change_weights, check_export_refused
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForMultimodalLM, PreTrainedConfig

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.checkpoints.find import find_checkpoint


IMAGE = 290  # ids from here on stand for images, sound and the like
TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 300, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
DEEP_VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_heads": 2, "patch_size": 8,
}  # fmt: skip
HEAD_DIM = {"head_dim": 16}
# Positions in time, height and width; on text all three are the same.
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
IMAGE_IDS = {"image_token_id": IMAGE, "video_token_id": 291, "vision_start_token_id": 292, "vision_end_token_id": 293}
BOUNDARIES = {"image_token_index": IMAGE, "boi_token_index": 291, "eoi_token_index": 292}


def whole_config(kind: str, text: dict[str, Any], vision: dict[str, Any], **more: Any) -> PreTrainedConfig:
    """The config of a multimodal model; `text` is what differs from the usual sizes."""
    made: PreTrainedConfig = getattr(transformers, kind)(text_config=TEXT | text, vision_config=vision, **more)
    return made


IMAGES = {"image_token_index": IMAGE}
PROJECTION = {"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64}
EXPERTS = {
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 8,
}
AUDIO = {
    "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "num_mel_bins": 16,
    "max_source_positions": 20,
}  # fmt: skip
OPT = {
    "model_type": "opt", "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300,
    "max_position_embeddings": 256, "word_embed_proj_dim": 64,
}  # fmt: skip
CROSSING = {
    "num_hidden_layers": 3, "cross_attention_layers": [1], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
GLOBAL = {"num_global_layers": 1, "attention_heads": 2, "vision_output_dim": 64, "intermediate_layers_indices": [0]}
EXPORTED: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma3": lambda: whole_config("Gemma3Config", HEAD_DIM | {"sliding_window": 8}, VISION | {"model_type": "siglip_vision_model"},
        mm_tokens_per_image=4, **BOUNDARIES),
    "llava": lambda: whole_config("LlavaConfig", {"model_type": "llama"},
        VISION | {"model_type": "clip_vision_model", "projection_dim": 32}, **IMAGES),
    "llama4": lambda: whole_config("Llama4Config", HEAD_DIM | EXPERTS, VISION | PROJECTION, **BOUNDARIES),
    "qwen2_5_vl": lambda: whole_config("Qwen2_5_VLConfig", MROPE, DEEP_VISION, **IMAGE_IDS),
    "qwen2_audio": lambda: transformers.Qwen2AudioConfig(text_config=TEXT | {"model_type": "qwen2"}, audio_config=AUDIO, audio_token_index=IMAGE),
}  # fmt: skip
OTHERS: dict[str, Callable[[], PreTrainedConfig]] = {
    "paligemma": lambda: whole_config("PaliGemmaConfig", HEAD_DIM | {"model_type": "gemma"},
        VISION | {"model_type": "siglip_vision_model", "vision_use_head": False, "projection_dim": 64}, projection_dim=64, **IMAGES),
    "mllama": lambda: whole_config("MllamaConfig", CROSSING, VISION | GLOBAL, image_token_index=299),
    "blip2": lambda: transformers.Blip2Config(text_config=OPT, vision_config=VISION, num_query_tokens=4,
        qformer_config=VISION | {"encoder_hidden_size": 32, "vocab_size": 30}),
}  # fmt: skip


def make_checkpoint(name: str, folder: Path) -> Any:
    torch.manual_seed(1)
    model = AutoModelForMultimodalLM.from_config((EXPORTED | OTHERS)[name](), dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "q_proj" in name:
            parameter.data *= 20
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"size": 16}', encoding="utf-8")
    return model


def text_prompt(length: int = 30) -> torch.Tensor:
    return torch.from_numpy(random_tokens(length)).long().clamp(max=IMAGE - 1)[None]


def assert_same_text(artifact: Path, whole: Any) -> None:
    """On text, the artifact's tokens are those of the multimodal model, and its logits differ by rounding alone."""
    model, prompt = NeuronModelForCausalLM.from_pretrained(artifact), text_prompt()
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **options), whole.generate(prompt, **options))
    with torch.inference_mode():
        expected = whole(input_ids=prompt).logits[:, -1:]
    torch.testing.assert_close(model(prompt, logits_to_keep=1).logits, expected.float(), atol=2e-6, rtol=0)


@pytest.mark.parametrize("name", EXPORTED)
def test_the_language_model_answers_as_the_whole(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = make_checkpoint(name, tmp_path / "checkpoint")
    artifact = export_tiny(tmp_path / "checkpoint", tmp_path / "artifact", dtype="auto")
    assert_same_text(artifact, whole)
    stored = load_file(artifact / "weights" / "model.safetensors")
    assert not [each for each in stored if any(part in each for part in ("vision", "visual", "projector", "audio"))]
    text_config = whole.config.get_text_config(decoder=True)
    config = AutoConfig.from_pretrained(artifact)
    assert config.model_type == text_config.model_type != whole.config.model_type
    assert config.architectures[0].endswith("ForCausalLM")
    assert not (artifact / "preprocessor_config.json").exists()
    (line,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    for part in ("visual", "vision_tower", "vision_model", "audio_tower", "multi_modal_projector"):
        held = any(part in name for name, _ in whole.named_modules() if name.count(".") < 2)
        assert (f"{part} (" in line) is held, (part, line)


def test_codes_of_a_multimodal_checkpoint_are_refused(tmp_path: Path) -> None:
    make_checkpoint("llava", tmp_path / "checkpoint")
    method = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
    change_config(tmp_path / "checkpoint", quantization_config=method)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name in tensors if name.endswith("self_attn.q_proj.weight") and "language" in name)
        outputs, inputs = tensors.pop(name).shape
        layer = name.removesuffix(".weight")
        tensors[f"{layer}.qweight"] = torch.zeros(inputs // 8, outputs, dtype=torch.int32)
        tensors[f"{layer}.qzeros"] = torch.zeros(inputs // 32, outputs // 8, dtype=torch.int32)
        tensors[f"{layer}.scales"] = torch.ones(inputs // 32, outputs, dtype=torch.float16)

    change_weights(tmp_path / "checkpoint", change)
    words = "multimodal checkpoint quantized by gptq"
    check_export_refused(words, tmp_path / "checkpoint", tmp_path / "out", quantization="checkpoint")


def test_a_config_alone_tells_the_language_model_and_an_adapter_of_the_whole_is_merged(tmp_path: Path) -> None:
    EXPORTED["qwen2_5_vl"]().save_pretrained(tmp_path)
    found = find_checkpoint(tmp_path, revision=None, token=None, trust_remote_code=False, weights=False)
    assert found.load_config().model_type == "qwen2_5_vl_text"
    whole = make_checkpoint("qwen2_5_vl", tmp_path / "checkpoint")
    adapted = peft.get_peft_model(whole, lora(target_modules=ATTENTION))
    adapted.save_pretrained(tmp_path / "adapter")
    assert_same_text(export(tmp_path / "checkpoint", tmp_path / "artifact", tmp_path / "adapter"), adapted.eval())


def drop(checkpoint: Path, part: str) -> None:
    change_weights(checkpoint, lambda tensors: tensors.pop(next(name for name in sorted(tensors) if part in name)))


def test_what_the_language_model_does_not_need_may_be_missing(tmp_path: Path) -> None:
    whole = make_checkpoint("llava", tmp_path / "checkpoint")
    drop(tmp_path / "checkpoint", "vision_tower")
    assert_same_text(export_tiny(tmp_path / "checkpoint", tmp_path / "artifact"), whole)
    drop(tmp_path / "checkpoint", "layers.1.mlp.up_proj")
    words = r"lacks .*layers\.1\.mlp\.up_proj\.weight, which LlamaForCausalLM needs"
    check_export_refused(words, tmp_path / "checkpoint", tmp_path / "other")


def test_a_language_model_with_other_results_alone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule of the whole that its language model knows nothing of, as a scale of the logits."""
    whole = make_checkpoint("llava", tmp_path / "checkpoint")
    forward = type(whole).forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits * 1.01
        return output

    monkeypatch.setattr(type(whole), "forward", scaled)
    words = r"the language model of LlavaForConditionalGeneration cannot run alone: on text, its logits differ by 0"
    check_export_refused(words, tmp_path / "checkpoint", tmp_path / "out")


ALONE = {
    "paligemma": r"the language model of PaliGemmaForConditionalGeneration attends in both directions",
    "mllama": r"MllamaForCausalLM cannot be exported: 2 attention calls were seen for num_hidden_layers=3",
    "blip2": r"Blip2ForConditionalGeneration does not run on text alone: .*pixel_values",
    "clip": r"is a clip model, which generates no text",
    "vit": r"is a vit model \(ViTConfig\), and transformers has no causal language model of this kind",
    "whisper": r"is an encoder-decoder \(whisper\); only decoders can be exported",
}


@pytest.mark.parametrize("name", ALONE)
def test_a_model_without_a_language_model_that_runs_alone_is_refused(name: str, tmp_path: Path) -> None:
    if name in OTHERS:
        make_checkpoint(name, tmp_path / "checkpoint")
    else:
        CONFIG_MAPPING[name]().save_pretrained(tmp_path / "checkpoint")
    check_export_refused(ALONE[name], tmp_path / "checkpoint", tmp_path / "out")
