# SPDX-License-Identifier: Apache-2.0
"""Multimodal checkpoints: the language model is exported with the very weights of the whole, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapting import ATTENTION, lora
from helpers import export_tiny, random_tokens, tiny_config
from quantized_files import change_config, change_weights
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForMultimodalLM,
    Blip2Config,
    CLIPConfig,
    Gemma3Config,
    Glm4vConfig,
    Llama4Config,
    LlavaConfig,
    Mistral3Config,
    MllamaConfig,
    PaliGemmaConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2AudioConfig,
    Qwen3VLConfig,
    ViTConfig,
    Wav2Vec2Config,
    WhisperConfig,
)

from optimum_neuron import NeuronModelForCausalLM, export_model
from optimum_neuron.checkpoints.find import find_config


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


def gemma3() -> PreTrainedConfig:
    vision = VISION | {"model_type": "siglip_vision_model"}
    text = TEXT | HEAD_DIM | {"sliding_window": 8}
    return Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **BOUNDARIES)


def llava() -> PreTrainedConfig:
    vision = VISION | {"model_type": "clip_vision_model", "projection_dim": 32}
    return LlavaConfig(text_config=TEXT | {"model_type": "llama"}, vision_config=vision, image_token_index=IMAGE)


def mistral3() -> PreTrainedConfig:
    vision = VISION | HEAD_DIM | {"model_type": "pixtral"}
    text = TEXT | HEAD_DIM | {"model_type": "mistral", "sliding_window": 8}
    return Mistral3Config(text_config=text, vision_config=vision, image_token_index=IMAGE)


def llama4() -> PreTrainedConfig:
    experts = {"intermediate_size_mlp": 96, "num_local_experts": 4, "interleave_moe_layer_step": 2}
    projection = {"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64}
    text = TEXT | HEAD_DIM | experts | {"attention_chunk_size": 8}
    return Llama4Config(text_config=text, vision_config=VISION | projection, **BOUNDARIES)


def qwen2_5_vl() -> PreTrainedConfig:
    return Qwen2_5_VLConfig(text_config=TEXT | MROPE, vision_config=DEEP_VISION, **IMAGE_IDS)


def qwen3_vl() -> PreTrainedConfig:
    vision = DEEP_VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    return Qwen3VLConfig(text_config=TEXT | HEAD_DIM | MROPE, vision_config=vision, **IMAGE_IDS)


def glm4v() -> PreTrainedConfig:
    text = TEXT | {"rope_parameters": MROPE["rope_parameters"] | {"partial_rotary_factor": 1.0}}
    return Glm4vConfig(text_config=text, vision_config=DEEP_VISION | {"image_size": 16}, **IMAGE_IDS)


def qwen2_audio() -> PreTrainedConfig:
    audio = {
        "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "num_mel_bins": 16,
        "max_source_positions": 20,
    }  # fmt: skip
    text = TEXT | {"model_type": "qwen2"}
    return Qwen2AudioConfig(text_config=text, audio_config=audio, audio_token_index=IMAGE)


def paligemma() -> PreTrainedConfig:
    vision = VISION | {"model_type": "siglip_vision_model", "vision_use_head": False, "projection_dim": 64}
    text = TEXT | HEAD_DIM | {"model_type": "gemma"}
    return PaliGemmaConfig(text_config=text, vision_config=vision, projection_dim=64, image_token_index=IMAGE)


def mllama() -> PreTrainedConfig:
    text = TEXT | {
        "num_hidden_layers": 3,
        "cross_attention_layers": [1],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    vision = VISION | {
        "num_global_layers": 1,
        "attention_heads": 2,
        "vision_output_dim": 64,
        "intermediate_layers_indices": [0],
    }
    return MllamaConfig(text_config=text, vision_config=vision, image_token_index=299)


def blip2() -> PreTrainedConfig:
    text = {"model_type": "opt", "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
            "vocab_size": 300, "max_position_embeddings": 256, "word_embed_proj_dim": 64}  # fmt: skip
    qformer = VISION | {"encoder_hidden_size": 32, "vocab_size": 30}
    return Blip2Config(text_config=text, vision_config=VISION, qformer_config=qformer, num_query_tokens=4)


EXPORTED = (gemma3, llava, mistral3, llama4, qwen2_5_vl, qwen3_vl, glm4v, qwen2_audio)


def make_checkpoint(
    make_config: Callable[[], PreTrainedConfig], folder: Path, dtype: torch.dtype = torch.float32
) -> Any:
    """Writes a tiny multimodal checkpoint whose attention decides; returns the model."""
    torch.manual_seed(1)
    model = AutoModelForMultimodalLM.from_config(make_config(), dtype=dtype).eval()
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


@pytest.mark.parametrize("make_config", EXPORTED, ids=lambda make: make.__name__)
def test_the_language_model_answers_text_as_the_whole_does(
    make_config: Callable[[], PreTrainedConfig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = make_checkpoint(make_config, tmp_path / "checkpoint")
    artifact = export_tiny(tmp_path / "checkpoint", tmp_path / "artifact")
    assert_same_text(artifact, whole)
    text_config = whole.config.get_text_config(decoder=True)
    config = AutoConfig.from_pretrained(artifact)
    assert config.model_type == text_config.model_type != whole.config.model_type
    assert config.architectures[0].endswith("ForCausalLM")
    assert not (artifact / "preprocessor_config.json").exists()
    (line,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    for part in ("visual", "vision_tower", "vision_model", "audio_tower", "multi_modal_projector"):
        held = any(part in name for name, _ in whole.named_modules() if name.count(".") < 2)
        assert (f"{part} (" in line) is held, (part, line)


@pytest.mark.slow
def test_the_language_model_of_a_multimodal_one_is_compiled(tmp_path: Path) -> None:
    whole = make_checkpoint(qwen2_5_vl, tmp_path / "checkpoint")
    artifact = export_tiny(tmp_path / "checkpoint", tmp_path / "artifact", target="cpu", mixed_step=False)
    assert_same_text(artifact, whole)


def test_only_weights_of_the_language_model_are_stored(tmp_path: Path) -> None:
    whole = make_checkpoint(gemma3, tmp_path / "checkpoint", torch.bfloat16)
    artifact = export_tiny(tmp_path / "checkpoint", tmp_path / "artifact", dtype="auto")
    stored = load_file(artifact / "weights" / "model.safetensors")
    language = whole.model.language_model.state_dict()
    assert {name.removeprefix("model.model.") for name in stored} >= set(language)
    assert not [name for name in stored if "vision" in name or "projector" in name]
    for name, tensor in language.items():
        assert torch.equal(stored[f"model.model.{name}"], tensor) and tensor.dtype == torch.bfloat16


def test_codes_of_a_multimodal_checkpoint_are_refused(tmp_path: Path) -> None:
    make_checkpoint(llava, tmp_path / "checkpoint")
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
    with pytest.raises(ValueError, match="multimodal checkpoint quantized by gptq"):
        export_tiny(tmp_path / "checkpoint", tmp_path / "out", quantization="checkpoint")
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_the_whole_is_merged(tmp_path: Path) -> None:
    whole = make_checkpoint(qwen2_5_vl, tmp_path / "checkpoint")
    adapted = peft.get_peft_model(whole, lora(target_modules=ATTENTION))
    adapted.save_pretrained(tmp_path / "adapter")
    artifact = export_model(
        tmp_path / "checkpoint", tmp_path / "artifact", config=tiny_config(), adapter=tmp_path / "adapter"
    )
    assert_same_text(artifact, adapted.eval())


def drop(checkpoint: Path, part: str) -> str:
    """Removes a tensor from a checkpoint's file; returns its name."""
    tensors = load_file(checkpoint / "model.safetensors")
    name = next(name for name in sorted(tensors) if part in name)
    del tensors[name]
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return name


def test_what_the_language_model_does_not_need_may_be_missing(tmp_path: Path) -> None:
    whole = make_checkpoint(llava, tmp_path / "checkpoint")
    drop(tmp_path / "checkpoint", "vision_tower")
    assert_same_text(export_tiny(tmp_path / "checkpoint", tmp_path / "artifact"), whole)
    drop(tmp_path / "checkpoint", "layers.1.mlp.up_proj")
    with pytest.raises(ValueError, match=r"lacks .*layers\.1\.mlp\.up_proj\.weight, which LlamaForCausalLM needs"):
        export_tiny(tmp_path / "checkpoint", tmp_path / "other")


def test_a_config_alone_tells_the_language_model(tmp_path: Path) -> None:
    """For what needs no weights, as an estimate of a Hub repository."""
    qwen2_5_vl().save_pretrained(tmp_path)
    found = find_config(tmp_path, revision=None, token=None, trust_remote_code=False)
    assert found.load_config().model_type == "qwen2_5_vl_text"


def test_a_language_model_that_computes_something_else_alone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule of the whole that its language model knows nothing of, as a scale of the logits."""
    whole = make_checkpoint(llava, tmp_path / "checkpoint")
    forward = type(whole).forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits * 1.01
        return output

    monkeypatch.setattr(type(whole), "forward", scaled)
    words = (
        r"the language model of LlavaForConditionalGeneration cannot run alone: on text, its logits differ by 0\.0\d+ "
    )
    with pytest.raises(ValueError, match=words):
        export_tiny(tmp_path / "checkpoint", tmp_path / "out" / "artifact")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("make_config", "words"),
    [
        (paligemma, r"the language model of PaliGemmaForConditionalGeneration attends in both directions"),
        (mllama, r"MllamaForCausalLM cannot be exported: 2 attention calls were seen for num_hidden_layers=3"),
        (blip2, r"Blip2ForConditionalGeneration does not run on text alone: .*pixel_values"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_multimodal_model_whose_language_model_cannot_run_alone_is_refused(
    make_config: Callable[[], PreTrainedConfig], words: str, tmp_path: Path
) -> None:
    make_checkpoint(make_config, tmp_path / "checkpoint")
    with pytest.raises(ValueError, match=words) as caught:
        export_tiny(tmp_path / "checkpoint", tmp_path / "out" / "artifact")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (CLIPConfig(), r"is a clip model, which generates no text"),
        (ViTConfig(), r"is a vit model \(ViTConfig\), and transformers has no causal language model of this kind"),
        (Wav2Vec2Config(), r"is a wav2vec2 model \(Wav2Vec2Config\), and transformers has no causal language model"),
        (WhisperConfig(), r"is an encoder-decoder \(whisper\); only decoders can be exported"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_models_of_images_and_sound_are_refused_by_name(config: PreTrainedConfig, words: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match=words) as caught:
        export_tiny(tmp_path / "checkpoint", tmp_path / "out" / "artifact")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
