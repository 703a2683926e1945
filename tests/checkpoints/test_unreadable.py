# SPDX-License-Identifier: Apache-2.0
"""An export names what is wrong with a checkpoint's files before it writes anything, and keys of config.json that the model's class does not read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import write_gguf
from helpers import export_tiny
from quantized_files import change_config, change_weights, check_export_refused
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from optimum_neuron.checkpoints.find import find_checkpoint
from optimum_neuron.checkpoints.gguf.header import read_header
from optimum_neuron.checkpoints.unread import _COMPUTES, _HARMLESS, unread_keys
from optimum_neuron.checkpoints.verbatim import check_verbatim


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


def test_one_number_that_no_probe_reaches_is_named_where_it_is_written(checkpoint: Path, tmp_path: Path) -> None:
    name = "model.embed_tokens.weight"
    change_weights(checkpoint, lambda tensors: tensors[name][0, 0].fill_(float("nan")))  # of the token that pads
    words = f"^{name} holds NaN or infinity in 1 of 19,200 places; repair it, or download it again$"
    check_export_refused(words, checkpoint, tmp_path / "artifact")
    # A type that cannot hold logits is told apart.
    change_weights(checkpoint, lambda tensors: tensors[name][0, 0].fill_(0.0))
    for each in ("model.norm.weight", "lm_head.weight"):
        change_weights(checkpoint, lambda tensors, each=each: tensors[each].mul_(1e3))
    export_tiny(checkpoint, tmp_path / "float32")
    words = "its logits are not finite: its weights are, so float16 is too narrow"
    check_export_refused(words, checkpoint, tmp_path / "float16", dtype="float16")


@pytest.mark.parametrize("broken", ["adapter", "checkpoint"])
def test_the_tokenizer_that_is_read_is_the_one_taken_over(broken: str, checkpoint: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(checkpoint / name, adapter / name)
    (tmp_path / broken / "tokenizer.json").write_text("[]", encoding="utf-8")
    found = find_checkpoint(checkpoint, revision=None, token=None, trust_remote_code=False)
    taken = [adapter]
    if broken == "checkpoint":
        check_verbatim(found, taken)
    with pytest.raises(ValueError, match="its tokenizer cannot be read"):
        check_verbatim(found, taken if broken == "adapter" else ())


def test_code_of_a_tokenizer_is_not_run(checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    document = json.loads((checkpoint / "tokenizer_config.json").read_text(encoding="utf-8"))
    document["auto_map"] = {"AutoTokenizer": ["tokens.Tokens", None]}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(document), encoding="utf-8")
    (checkpoint / "tokens.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n", encoding="utf-8")
    export_tiny(checkpoint, tmp_path / "artifact")
    assert not (tmp_path / "ran").exists()
    assert "its tokenizer is taken over unread: it needs code of the checkpoint's" in caplog.text


def test_a_link_to_nothing_is_no_missing_file(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer.json").symlink_to("../blobs/gone")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json is a link to \.\./blobs/gone, which does not exist"):
        export_tiny(checkpoint, tmp_path / "artifact")


def test_a_checkpoint_without_a_tokenizer_is_exported_and_its_config_is_parsed_once(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (checkpoint / name).unlink()
    parsed: list[str] = []
    parse = PreTrainedConfig.get_config_dict.__func__  # type: ignore[attr-defined]

    def get_config_dict(cls: Any, folder: str | Path, **options: Any) -> Any:
        parsed.append(str(folder))
        return parse(cls, folder, **options)

    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", classmethod(get_config_dict))
    artifact = export_tiny(checkpoint, tmp_path / "artifact")
    assert parsed.count(str(checkpoint)) == 1 and not list(artifact.glob("tokenizer*"))


def test_a_gguf_file_that_is_cut_or_changed_anywhere_is_read_or_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    weights = write_gguf(tiny_checkpoint, path, "Q8_0").values()
    stored, whole = read_header(path).stored, path.read_bytes()
    assert (stored.tensors, stored.elements) == (len(weights), sum(each.numel() for each in weights))
    for length in (*range(0, 2000, 37), len(whole) // 2, len(whole) - 64):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"truncated or corrupt|is no GGUF file"):
            read_header(path)
    places, bits = (np.random.default_rng(0).integers(0, end, 400) for end in (12_000, 8))
    for place, bit in zip(places, bits, strict=True):
        changed = bytearray(whole)
        changed[place] ^= 1 << int(bit)
        path.write_bytes(changed)
        try:
            read_header(path)
        except ValueError as error:
            assert str(path) in str(error)


YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
# Of published config.json files, what is said of computing by names that the class lacks, and what is not and looks like it.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen2.5": {"model_type": "qwen2", "max_window_layers": 28, "sliding_window": 131072, "use_sliding_window": False, "rope_theta": 1e6,
                "use_mrope": False, "rope_scaling": YARN},
    "Gemma 2": {"model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
                "sliding_window": 4096, "sliding_window_size": 4096, "cache_implementation": "hybrid", "rope_theta": 10000.0},
    "Gemma 3": {"model_type": "gemma3_text", "attn_logit_softcapping": None, "rope_local_base_freq": 10000, "rope_theta": 1000000,
                "sliding_window_pattern": 6, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
    "Phi 4 mini": {"model_type": "phi3", "original_max_position_embeddings": 4096, "max_position_embeddings": 131072, "lm_head_bias": False,
                   "partial_rotary_factor": 0.75, "full_attn_mod": 1, "interpolate_factor": 1, "mlp_bias": False, "hidden_size": 3072,
                   "num_attention_heads": 24, "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"}},
    "gpt-oss": {"model_type": "gpt_oss", "experts_per_token": 4, "num_experts_per_tok": 4, "initial_context_length": 4096,
                "rope_theta": 150000, "rope_scaling": YARN | {"rope_type": "yarn", "truncate": False}},
    "DeepSeek V2": {"model_type": "deepseek_v2", "aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1, "scoring_func": "softmax",
                    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    "DeepSeek V3": {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "BLOOM": {"model_type": "bloom", "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "offset_alibi": 100,
              "skip_bias_add": True},
    "StarCoder2": {"model_type": "starcoder2", "activation_function": "gelu", "norm_epsilon": 1e-5, "layer_norm_epsilon": 1e-5,
                   "norm_type": "layer_norm", "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True},
    "Cohere 2": {"model_type": "cohere2", "layer_switch": 4, "rotary_pct": 1.0, "order_of_interleaved_layers": "local_attn_first",
                 "position_embedding_type": "rope_gptj", "sliding_window_pattern": 4, "use_gated_activation": True, "use_parallel_block": True},
    "GPT-J": {"model_type": "gptj", "rotary": True, "scale_attn_weights": True, "summary_type": "cls_index"},
    "Mamba": {"model_type": "mamba", "fused_add_norm": True, "rms_norm": True, "rescale_prenorm_residual": False, "ssm_cfg": {}},
}  # fmt: skip


def read(document: dict[str, Any]) -> dict[str, Any]:
    config: PreTrainedConfig = CONFIG_MAPPING[document["model_type"]].from_dict(json.loads(json.dumps(document)))
    return unread_keys(document, config)


@pytest.mark.parametrize("family", PUBLISHED)
def test_of_published_configs_no_key_is_named(family: str) -> None:
    more = {"architectures": ["X"], "use_cache": True, "transformers_version": "4.40.0"}
    assert read(PUBLISHED[family] | more) == {}


LINEAR = {"rope_type": "linear", "factor": 4.0}
ODD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a window": ({"sliding_window": 4096, "max_position_embeddings": 4096}, {"sliding_window": 4096}),
    "soft caps": ({"attn_logit_softcapping": 50.0, "logit_cap": 30.0}, {"attn_logit_softcapping": 50.0, "logit_cap": 30.0}),
    "scales": ({"logit_scale": 0.5, "embedding_multiplier": 12, "scale_emb": 12, "residual_multiplier": 1.0}, {
        "logit_scale": 0.5, "embedding_multiplier": 12, "scale_emb": 12}),
    "heads": ({"num_attention_heads": 16, "num_heads": 12}, {"num_heads": 12}),
    "another epsilon": ({"rms_norm_eps": 1e-5, "layer_norm_epsilon": 1e-6}, {"layer_norm_epsilon": 1e-6}),
    "another activation": ({"hidden_act": "silu", "hidden_activation": "gelu"}, {"hidden_activation": "gelu"}),
    "a part of heads": ({"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.5}),
    "a member of rope": ({"rope_scaling": LINEAR | {"attn_factor": 0.5}}, {"rope_scaling.attn_factor": 0.5}),
    "a part in rope": ({"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}}, {"rope_parameters.partial_rotary_factor": 0.5}),
    "two bases": ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}}, {"rope_theta": 5e5}),
    "two ropes": ({"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"factor": 8.0}}, {"rope_parameters.factor": 8.0}),
    "types that contradict": ({"rope_scaling": LINEAR | {"type": "dynamic"}}, {"rope_scaling.type": "dynamic"}),
    "a list for a type": ({"rope_scaling": LINEAR | {"type": ["linear"]}}, {"rope_scaling.type": ["linear"]}),
    "a misspelled rope": ({"rope_scale": LINEAR}, {"rope_scale": LINEAR}),
    "experts": ({"num_local_experts": 8, "num_experts_per_tok": 2}, {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "alibi": ({"use_alibi": True, "use_qk_norm": True, "alibi": False}, {"use_alibi": True, "use_qk_norm": True}),
    "other heads": ({"model_type": "gpt2", "head_dim": 7, "num_key_value_heads": 2}, {"head_dim": 7, "num_key_value_heads": 2}),
    "rope of a model without": ({"model_type": "gpt2", "rope_scaling": LINEAR}, {
        "rope_scaling.rope_type": "linear", "rope_scaling.factor": 4.0}),
    "scores": ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, {"scoring_func": "softmax"}),
    "chunks": ({"model_type": "qwen2", "dual_chunk_attention_config": {"chunk_size": 262144}}, {
        "dual_chunk_attention_config": {"chunk_size": 262144}}),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_a_key_that_a_class_does_not_read_is_named(odd: str) -> None:
    document, named = ODD[odd]
    assert read({"model_type": "llama"} | document) == named


def test_keys_by_which_any_other_class_computes_are_named_for_llama() -> None:
    """The vocabulary holds the keys of all causal language models of transformers."""
    own = {*CONFIG_MAPPING["llama"].__dataclass_fields__, *CONFIG_MAPPING["llama"].attribute_map}
    own |= {"rope_scaling", "rope_theta", "layer_types"}
    kinds = [CONFIG_MAPPING[kind] for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind in CONFIG_MAPPING]
    names = {name for kind in kinds for name in kind.__dataclass_fields__}
    computing = {name for name in names - own if _COMPUTES.search(name) and not _HARMLESS.search(name)}
    assert len(computing) > 250
    assert read({"model_type": "llama"} | dict.fromkeys(computing, 0.37)).keys() == computing


def test_what_is_unread_is_named_once(checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    change_config(checkpoint, sliding_window=8, logit_scale=0.5)
    export_tiny(checkpoint, tmp_path / "artifact")
    (line,) = [record.getMessage() for record in caplog.records if "does not read" in record.getMessage()]
    assert "its config.json says sliding_window=8, logit_scale=0.5, which LlamaConfig does not read" in line
