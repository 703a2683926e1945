# SPDX-License-Identifier: Apache-2.0
"""GGUF architectures in transformers' words, with the facts that stand in llama.cpp's code and in no file.

Sources: llama.cpp's converter (its package `conversion`), its `src/models` and `src/llama-model.cpp`; transformers' config classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .keys import NEEDED, GgufKeys


_RMS_NORM, _LAYER_NORM = NORMS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
_RMS, _SILU = {_RMS_NORM: "rms_norm_eps"}, {"hidden_act": "silu"}
_SLIDING, _FULL = "sliding_attention", "full_attention"

Fields = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """A translation of a file's keys to a config of transformers' `model_type`."""

    model_type: str
    # Fields of the config by key; a file without such a key is refused, or llama.cpp's value is taken.
    numbers: Mapping[str, str] = field(default_factory=lambda: _RMS)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Fields that stand in no key, and keys that have one value in all files of the architecture.
    fixed: Mapping[str, Any] = field(default_factory=lambda: _SILU)
    same: Mapping[str, Any] = field(default_factory=dict)
    # Fields that are true where a file has a tensor with this end of its name.
    tensors: Mapping[str, str] = field(default_factory=dict)
    # Functions that add fields, from keys and the fields so far, in turn.
    more: tuple[Callable[[GgufKeys, Fields], Fields], ...] = ()
    # The config's names of sizes with other names than usual.
    names: Mapping[str, str] = field(default_factory=dict)
    # The class takes heads of any size, layers with different heads, a rotated part of its own size, or of each head.
    heads_vary: bool = True
    layers_vary: bool = False
    is_latent: bool = False
    is_partial: bool = False
    # Parameters of the type "yarn" that stand in no key; None without a rotary embedding.
    rope: Mapping[str, Any] | None = field(default_factory=dict)


def _llama(keys: GgufKeys, fields: Fields) -> Fields:
    """Add the fields of Mistral's and Mixtral's files, which have this architecture too."""
    window, experts = keys.take_whole("attention.sliding_window", 0), keys.take_whole("expert_count", 0)
    if not window and not experts:
        return {}
    if fields["attention_bias"] or fields["mlp_bias"]:
        raise keys.make_refusal("expert_count" if experts else "attention.sliding_window", "the file also has biases")
    found = {"model_type": "mixtral" if experts else "mistral", "sliding_window": window or None}
    if experts:
        found |= {"num_local_experts": experts, "num_experts_per_tok": keys.take_whole("expert_used_count", least=1)}
    return found


def _qwen_moe(keys: GgufKeys, fields: Fields) -> Fields:
    """Add experts in each layer, as in llama.cpp, which makes their weights sum to 1 in Qwen3's alone."""
    is_3 = keys.header.architecture == "qwen3moe"
    norms = keys.take_flag("expert_weights_norm", is_3)
    found = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": norms}
    shared = {} if is_3 else {"shared_expert_intermediate_size": keys.take_whole("expert_shared_feed_forward_length")}
    return found | shared


def _window(keys: GgufKeys, fields: Fields, period: int, default: Any = NEEDED) -> Fields:
    """Add a window, and the layers that have it: all but the last of each period, where the file does not list them."""
    layers, width = fields["num_hidden_layers"], keys.take_whole("attention.sliding_window", default, least=1)
    pattern = keys.take_layers("attention.sliding_window_pattern", layers, period)
    if isinstance(pattern, int):
        pattern = [layer % pattern < pattern - 1 if pattern else True for layer in range(layers)]
    return {"sliding_window": width, "layer_types": [_SLIDING if slides else _FULL for slides in pattern]}


def _gemma_scale(fields: Fields, layers_of_27b: int) -> int:
    """Return the scale of queries; llama.cpp knows the models of 27B, with another one, by their layers."""
    is_27b = fields["num_hidden_layers"] == layers_of_27b
    return int(fields["hidden_size"] // fields["num_attention_heads"] if is_27b else fields["head_dim"])


def _gemma2(keys: GgufKeys, fields: Fields) -> Fields:
    return _window(keys, fields, 2, 4096) | {
        "query_pre_attn_scalar": _gemma_scale(fields, 46),
        "attn_logit_softcapping": keys.take_number("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": keys.take_number("final_logit_softcapping", 30.0) or None,
    }


def _two_ropes(keys: GgufKeys, fields: Fields, near: float) -> Fields:
    """Give layers with a window a rotary embedding of their own, which no scaling changes."""
    sliding = {"rope_type": "default", "rope_theta": keys.take_number("rope.freq_base_swa", near)}
    return {"rope_parameters": {_FULL: fields["rope_parameters"], _SLIDING: sliding}}


def _gemma3(keys: GgufKeys, fields: Fields) -> Fields:
    windows = _window(keys, fields, 6, None)
    if windows["sliding_window"] is None:
        windows = {"layer_types": [_FULL] * fields["num_hidden_layers"]}
    cap = keys.take_number("final_logit_softcapping", 0.0) or None
    scale = {"query_pre_attn_scalar": _gemma_scale(fields, 62), "final_logit_softcapping": cap}
    return windows | scale | _two_ropes(keys, fields, 10000.0)


def _olmo2(keys: GgufKeys, fields: Fields) -> Fields:
    if "attention.sliding_window" not in keys:
        return {}
    ropes = _two_ropes(keys, fields, fields["rope_parameters"]["rope_theta"])
    return {"model_type": "olmo3"} | _window(keys, fields, 4) | ropes


def _wide_experts(keys: GgufKeys, fields: Fields) -> Fields:
    size = fields["intermediate_size"]
    why = f"its experts are as wide as feed_forward_length, {size}"
    keys.require_same("expert_feed_forward_length", size, why=why)
    return {}


def _phi3(keys: GgufKeys, fields: Fields) -> Fields:
    original = fields["rope_parameters"].get("original_max_position_embeddings", fields["max_position_embeddings"])
    window = keys.take_whole("attention.sliding_window", 0) or None
    return {"sliding_window": window, "original_max_position_embeddings": original}


def _falcon(keys: GgufKeys, fields: Fields) -> Fields:
    """Add the fields of Falcon; llama.cpp runs attention and feed-forward in parallel in all of them."""
    two_norms = any(name.endswith("attn_norm_2.weight") for name in keys.header.tensors)
    is_new = two_norms or fields["num_key_value_heads"] > 1
    norms = (2 if two_norms else 1) if is_new else None
    return {"new_decoder_architecture": is_new, "num_ln_in_parallel_attn": norms, "multi_query": not is_new}


def _one_key_per_query(keys: GgufKeys, fields: Fields) -> Fields:
    if fields.pop("num_key_value_heads") != fields["num_attention_heads"]:
        raise keys.make_refusal("attention.head_count_kv", f"it is not head_count, {fields['num_attention_heads']}")
    return {}


def _bloom(keys: GgufKeys, fields: Fields) -> Fields:
    wide = 4 * fields["hidden_size"]
    if fields.pop("intermediate_size") != wide:
        raise keys.make_refusal("feed_forward_length", f"a BLOOM of this size has {wide}")
    return {}


def _lfm2(keys: GgufKeys, fields: Fields) -> Fields:
    """Add the kinds of layers: one without heads of keys is a convolution."""
    heads, layers = fields["num_key_value_heads"], fields["num_hidden_layers"]
    each = heads if isinstance(heads, tuple) else (heads,) * layers
    if len(set(each) - {0}) != 1:
        raise keys.make_refusal("attention.head_count_kv", "layers with attention have one number of heads")
    return {"num_key_value_heads": max(each), "layer_types": [_FULL if count else "conv" for count in each]}


def _qwen35(keys: GgufKeys, fields: Fields) -> Fields:
    """Add linear attention, which most layers have. A text has one position on each axis: the sections of the third change nothing."""
    interval = keys.take_whole("full_attention_interval", least=1)
    heads = keys.take_whole("ssm.time_step_rank", least=1)
    sections = [size for size in keys.take_layers("rope.dimension_sections", 4) if size]
    is_full = [(layer + 1) % interval == 0 for layer in range(fields["num_hidden_layers"])]
    return {
        "layer_types": [_FULL if full else "linear_attention" for full in is_full],
        "linear_num_value_heads": heads,
        "linear_value_head_dim": keys.take_whole("ssm.inner_size", least=heads) // heads,
        "rope_parameters": fields["rope_parameters"] | {"mrope_section": sections, "mrope_interleaved": True},
    }


def _deepseek2(keys: GgufKeys, fields: Fields) -> Fields:
    """Add latent attention, with one head of keys in the file. DeepSeek-V3's files are those with sigmoid gates."""
    rank, rotated, rope = fields["kv_lora_rank"], fields["head_dim"], fields["rope_parameters"]
    if fields["num_key_value_heads"] != 1:
        raise keys.make_refusal("attention.head_count_kv", "an old converter made it; convert the checkpoint again")
    keys.require_same("attention.key_length", rank + rotated, why=f"the ranks are {rank} and {rotated}")
    keys.require_same("attention.value_length", rank, why=f"the rank is {rank}")
    keys.require_same("expert_gating_func", 1, 2, why="experts are chosen by softmax, 1, or sigmoid, 2")
    is_3 = keys.header.sizes().get("expert_gating_func") == 2
    if not is_3:
        keys.require_same("expert_weights_norm", False, why="a DeepSeek-V2 leaves the weights of experts as they are")
    groups = keys.take_whole("expert_group_count", 0)
    # The converter writes a tenth of mscale_all_dim, to which mscale is equal in all published ones.
    scale = round(10 * keys.take_number("rope.scaling.yarn_log_multiplier", 0.0), 6)
    return {
        "rope_parameters": rope | ({"mscale": scale, "mscale_all_dim": scale} if scale else {}),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys.take_whole("attention.key_length_mla", least=rotated) - rotated,
        "q_lora_rank": keys.take_whole("attention.q_lora_rank", 0) or None,
        **({"model_type": "deepseek_v3", "rope_interleave": True} if is_3 else {}),
        "norm_topk_prob": keys.take_flag("expert_weights_norm", False),
        "n_group": groups or (1 if is_3 else None),
        "topk_group": keys.take_whole("expert_group_used_count", 0) or (1 if is_3 else None),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "num_key_value_heads": fields["num_attention_heads"],
    }


_TANH, _GELU = "gelu_pytorch_tanh", {"hidden_activation": "gelu_pytorch_tanh"}
_QWEN = _SILU | {"use_sliding_window": False}
_MOE = _RMS | {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_LOCAL_MOE = _MOE | {"expert_count": "num_local_experts"}
_QWEN_MOE = _MOE | {"expert_feed_forward_length": "moe_intermediate_size"}
_SCALES = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
_LATENT = {
    "leading_dense_block_count": "first_k_dense_replace", "attention.kv_lora_rank": "kv_lora_rank",
    "attention.value_length_mla": "v_head_dim", "expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size", "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
}  # fmt: skip
_LINEAR = _RMS | {
    "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
}  # fmt: skip
_LAYERS = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
_GPT2 = _LAYERS | {"max_position_embeddings": "n_positions", "hidden_size": "n_embd", "intermediate_size": "n_inner"}
_BIAS = {"attention_bias": "attn_q.bias"}
_BIASES = _BIAS | {"mlp_bias": "ffn_up.bias"}
_EPSILON = {_LAYER_NORM: "layer_norm_epsilon"}

ARCHITECTURES = {
    "llama": Architecture("llama", tensors=_BIASES, more=(_llama,), same={"tensor_data_layout": "Meta AI original pth"}),
    "qwen2": Architecture("qwen2", fixed=_QWEN),
    "qwen2moe": Architecture("qwen2_moe", _QWEN_MOE, fixed=_QWEN, tensors={"qkv_bias": "attn_q.bias"}, more=(_qwen_moe,)),
    "qwen3": Architecture("qwen3", fixed=_QWEN, tensors=_BIAS),
    "qwen3moe": Architecture("qwen3_moe", _QWEN_MOE, fixed=_QWEN, tensors=_BIAS, more=(_qwen_moe,)),
    "qwen35": Architecture("qwen3_5_text", _LINEAR, tensors=_BIAS, more=(_qwen35,), is_partial=True),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text", _QWEN_MOE | _LINEAR | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        tensors=_BIAS, more=(_qwen35,), is_partial=True,
    ),
    "gemma": Architecture("gemma", fixed={"hidden_act": _TANH, "use_bidirectional_attention": False}, tensors=_BIAS),
    "gemma2": Architecture("gemma2", fixed=_GELU | {"use_bidirectional_attention": False}, tensors=_BIAS, more=(_gemma2,)),
    "gemma3": Architecture(
        "gemma3_text", fixed=_GELU | {"use_bidirectional_attention": False, "attn_logit_softcapping": None}, tensors=_BIAS,
        more=(_gemma3,),
    ),
    "gpt-oss": Architecture(
        "gpt_oss", _LOCAL_MOE,
        fixed=_SILU | {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}, tensors=_BIAS, more=(_wide_experts, lambda keys, fields: _window(keys, fields, 2)),
        rope={"truncate": False},  # in all published ones
    ),
    "minimax-m2": Architecture("minimax_m2", _LOCAL_MOE, more=(_wide_experts,), same={"expert_gating_func": 2}, is_partial=True),
    "phi3": Architecture("phi3", more=(_phi3,), is_partial=True),
    "granite": Architecture("granite", _RMS | _SCALES, defaults=dict.fromkeys(_SCALES, 1.0), tensors=_BIASES),
    "olmo2": Architecture("olmo2", tensors=_BIAS, more=(_olmo2,)),
    "stablelm": Architecture(
        "stablelm", {_LAYER_NORM: "layer_norm_eps"}, more=(lambda keys, _: {"use_parallel_residual": keys.take_flag("use_parallel_residual")},),
        tensors={"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"}, heads_vary=False, is_partial=True,
    ),
    "starcoder2": Architecture(
        "starcoder2", {_LAYER_NORM: "norm_epsilon"}, fixed={"hidden_act": _TANH, "sliding_window": None},
        tensors={"use_bias": "attn_q.bias"},
    ),
    "nemotron": Architecture(
        "nemotron", {_LAYER_NORM: "norm_eps"}, fixed={"hidden_act": "relu2"}, tensors=_BIASES, is_partial=True
    ),
    "falcon": Architecture(
        "falcon", _EPSILON, fixed={"activation": "gelu", "alibi": False, "parallel_attn": True}, more=(_falcon,),
        tensors={"bias": "attn_qkv.bias"}, heads_vary=False, same={"tensor_data_layout": "jploski"},
        names={"num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden_size"},
    ),
    "bloom": Architecture(
        "bloom", _EPSILON, fixed={"apply_residual_connection_post_layernorm": False}, more=(_bloom, _one_key_per_query),
        same={"attention.max_alibi_bias": 8.0},
        names=_LAYERS | {"max_position_embeddings": "seq_length"}, heads_vary=False, rope=None,
    ),
    "gpt2": Architecture(
        "gpt2", _EPSILON, more=(_one_key_per_query,), names=_GPT2, heads_vary=False, rope=None,
        fixed={"activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    ),
    "lfm2": Architecture(
        "lfm2", {_RMS_NORM: "norm_eps", "shortconv.l_cache": "conv_L_cache"}, fixed={"block_auto_adjust_ff_dim": False},
        tensors={"conv_bias": "shortconv.conv.bias"}, more=(_lfm2,), layers_vary=True,
    ),
    "deepseek2": Architecture(
        "deepseek_v2", _RMS | _LATENT, defaults={"expert_weights_scale": 1.0}, tensors=_BIASES, more=(_deepseek2,), is_latent=True
    ),
}  # fmt: skip
