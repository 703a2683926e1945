# SPDX-License-Identifier: Apache-2.0
"""What a GGUF file of each architecture says in transformers' words, and what llama.cpp's code says that no file does.

Sources: llama.cpp's converter (the package `conversion`), its `src/models` and `src/llama-model.cpp`; transformers' config classes.
An architecture that is not listed is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .gguf_keys import Keys


_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_SILU = {"hidden_act": "silu"}
_GEMMA_GELU = "gelu_pytorch_tanh"


@dataclass(frozen=True)
class Architecture:
    """How a config is read from a file's keys.

    Attributes:
        model_type: transformers' name.
        names: what the config calls a size, where it is not the common name; None where it has none.
        numbers: fields of the config by key; a file without such a key is refused.
        counts: likewise, of whole numbers.
        defaults: what llama.cpp takes where a file lacks such a key.
        fixed: fields that no key tells.
        tensors: fields that are true where a file has a tensor whose name ends so.
        more: what else the config needs: takes keys and the fields so far.
        heads_vary: whether the class takes heads of another size than the hidden size over their number.
        layers_vary: whether its layers may differ in heads.
        is_latent: whether queries and keys have a part that is rotated, and a size of its own.
        is_partial: whether the class can rotate a part of each head.
        rope: parameters of the type "yarn" that no key tells; None where there is no rotary embedding.
    """

    model_type: str
    numbers: Mapping[str, str] = field(default_factory=lambda: _RMS)
    counts: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str | None] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=lambda: _SILU)
    tensors: Mapping[str, str] = field(default_factory=dict)
    more: Callable[[Keys, dict[str, Any]], dict[str, Any]] = lambda keys, fields: {}
    heads_vary: bool = True
    layers_vary: bool = False
    is_latent: bool = False
    is_partial: bool = False
    rope: Mapping[str, Any] | None = field(default_factory=dict)


def _llama(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    """Mistral's and Mixtral's files are of this architecture, too; Mistral's lack its window where it has none."""
    keys.same("tensor_data_layout", "Meta AI original pth", why="another order of the rows is not known")
    window, experts = keys.whole("attention.sliding_window", 0), keys.whole("expert_count", 0)
    if not window and not experts:
        return {}
    if any(fields[name] for name in ("attention_bias", "mlp_bias")):
        raise keys.refusal("expert_count" if experts else "attention.sliding_window", "the file also has biases")
    found: dict[str, Any] = {"model_type": "mistral", "sliding_window": window or None}
    if experts:
        used = keys.whole("expert_used_count", least=1)
        found |= {"model_type": "mixtral", "num_local_experts": experts, "num_experts_per_tok": used}
    return found


def _experts(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp has experts in each layer of Qwen's."""
    return {"decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": keys.whole("expert_feed_forward_length")}


def _qwen2_moe(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    shared = keys.whole("expert_shared_feed_forward_length")
    return _experts(keys, fields) | {
        "shared_expert_intermediate_size": shared, "norm_topk_prob": keys.flag("expert_weights_norm", False)
    }  # fmt: skip


def _qwen3_moe(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    return _experts(keys, fields) | {"norm_topk_prob": keys.flag("expert_weights_norm", True)}


def _window(keys: Keys, layers: int, period: int, *default: Any) -> dict[str, Any]:
    """A window, and the layers that have it: all but the last of each period, where the file does not list them."""
    width = keys.whole("attention.sliding_window", *default, least=1)
    pattern = keys.of_layers("attention.sliding_window_pattern", layers, period)
    if isinstance(pattern, int):
        pattern = [layer % pattern < pattern - 1 if pattern else True for layer in range(layers)]
    return {"sliding_window": width, "layer_types": [_SLIDING if slides else _FULL for slides in pattern]}


def _gemma2(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    layers = fields["num_hidden_layers"]
    return _window(keys, layers, 2, 4096) | {
        "query_pre_attn_scalar": _gemma_scale(fields, 46),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _gemma_scale(fields: dict[str, Any], layers_of_27b: int) -> int:
    """llama.cpp knows the models of 27B by their layers: they divide by another number than the size of a head."""
    is_27b = fields["num_hidden_layers"] == layers_of_27b
    return int(fields["hidden_size"] // fields["num_attention_heads"] if is_27b else fields["head_dim"])


def _gemma3(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    """Layers with a window have a rotary embedding of their own, which no scaling changes."""
    layers = fields["num_hidden_layers"]
    windows = _window(keys, layers, 6, None)
    if windows["sliding_window"] is None:
        windows = {"layer_types": [_FULL] * layers}
    near = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10000.0)}
    return windows | {
        "query_pre_attn_scalar": _gemma_scale(fields, 62),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        "rope_parameters": {_FULL: fields["rope_parameters"], _SLIDING: near},
    }


def _gpt_oss(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    keys.same("expert_feed_forward_length", fields["intermediate_size"], why="its experts have another size in the config")
    return _window(keys, fields["num_hidden_layers"], 2)


def _phi3(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    original = fields["rope_parameters"].get("original_max_position_embeddings")
    return {
        "sliding_window": keys.whole("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": original or fields["max_position_embeddings"],
    }


def _olmo2(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    """A file with a window is an OLMo 3's: its layers with a window have a rotary embedding that no scaling changes."""
    if "attention.sliding_window" not in keys:
        return {}
    rope = fields["rope_parameters"]
    near = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", rope["rope_theta"])}
    return {
        "model_type": "olmo3",
        "rope_parameters": {_FULL: rope, _SLIDING: near},
        **_window(keys, fields["num_hidden_layers"], 4),
    }


def _stablelm(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    return {"use_parallel_residual": keys.flag("use_parallel_residual")}


def _falcon(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp runs attention and feed-forward side by side in all of them."""
    keys.same("tensor_data_layout", "jploski", why="another order of the rows is not known")
    two_norms = any(name.endswith("attn_norm_2.weight") for name in keys.header.tensors)
    is_new = two_norms or fields["num_key_value_heads"] > 1
    return {
        "new_decoder_architecture": is_new,
        "num_ln_in_parallel_attn": (2 if two_norms else 1) if is_new else None,
        "multi_query": not is_new,
    }


def _bloom(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    keys.same("attention.max_alibi_bias", 8.0, why="BLOOM's slopes begin at 8")
    wide = 4 * fields["hidden_size"]
    if fields["intermediate_size"] != wide:
        raise keys.refusal("feed_forward_length", f"a BLOOM of this size has {wide}")
    return _one_key_per_query(keys, fields)


def _one_key_per_query(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    heads = fields["num_attention_heads"]
    if fields["num_key_value_heads"] != heads:
        raise keys.refusal("attention.head_count_kv", f"this model has as many as of queries, {heads}")
    return {}


def _nemotron(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    """The converter writes its epsilon by two names."""
    keys.same("attention.layer_norm_rms_epsilon", fields["norm_eps"], why="it has one epsilon, and here are two")
    return {}


def _lfm2(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    """A layer without heads of keys is a convolution."""
    layers = fields["num_hidden_layers"]
    heads = fields["num_key_value_heads"]
    each = heads if isinstance(heads, tuple) else (heads,) * layers
    found = set(each) - {0}
    if len(found) != 1:
        raise keys.refusal("attention.head_count_kv", "the layers with attention have one number of heads")
    types = [_FULL if count else "conv" for count in each]
    return {"num_key_value_heads": found.pop(), "layer_types": types}


def _deepseek2(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    """Latent attention. The file's own sizes of heads are those of the latents; DeepSeek-V3's files have sigmoid gates."""
    rank, rotated, rope = fields["kv_lora_rank"], fields["head_dim"], fields["rope_parameters"]
    keys.same("attention.head_count_kv", 1, why="a file with a head of keys for each query is of an old converter")
    keys.same("attention.key_length", rank + rotated, why="the latents and what is rotated are of other sizes")
    keys.same("attention.value_length", rank, why="the latents are of another size")
    keys.same("expert_gating_func", 1, why="a DeepSeek-V2 chooses experts by softmax")
    keys.same("expert_weights_norm", False, why="a DeepSeek-V2 leaves the weights of experts as they are")
    groups = keys.whole("expert_group_count", 0)
    # The converter writes a tenth of mscale_all_dim, to which mscale is equal in all published ones.
    scale = round(10 * keys.number("rope.scaling.yarn_log_multiplier", 0.0), 6)
    return {
        "rope_parameters": rope | ({"mscale": scale, "mscale_all_dim": scale} if scale else {}),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys.whole("attention.key_length_mla", least=rotated) - rotated,
        "q_lora_rank": keys.whole("attention.q_lora_rank", 0) or None,
        "n_group": groups or None,
        "topk_group": keys.whole("expert_group_used_count", 0) or None,
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "num_key_value_heads": fields["num_attention_heads"],
    }


_QWEN = _SILU | {"use_sliding_window": False}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_GRANITE = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
_BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}
_GEMMA = {"hidden_activation": _GEMMA_GELU, "use_bidirectional_attention": False}
_ATTENTION_BIAS = {"attention_bias": "attn_q.bias"}
_LAYER_NORM = "attention.layer_norm_epsilon"

ARCHITECTURES = {
    "llama": Architecture("llama", tensors=_BIASES, more=_llama),
    "qwen2": Architecture("qwen2", fixed=_QWEN),
    "qwen2moe": Architecture(
        "qwen2_moe", fixed=_QWEN, counts=_EXPERTS, tensors={"qkv_bias": "attn_q.bias"}, more=_qwen2_moe
    ),
    "qwen3": Architecture("qwen3", fixed=_QWEN, tensors=_ATTENTION_BIAS),
    "qwen3moe": Architecture(
        "qwen3_moe", fixed=_QWEN, counts=_EXPERTS, tensors=_ATTENTION_BIAS, more=_qwen3_moe
    ),
    "gemma": Architecture("gemma", fixed=_GEMMA | {"hidden_act": _GEMMA_GELU}),
    "gemma2": Architecture("gemma2", fixed=_GEMMA, tensors=_ATTENTION_BIAS, more=_gemma2),
    "gemma3": Architecture("gemma3_text", fixed=_GEMMA, tensors=_ATTENTION_BIAS, more=_gemma3),
    "gpt-oss": Architecture(
        "gpt_oss",
        counts={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        fixed=_SILU | {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        tensors=_ATTENTION_BIAS,
        more=_gpt_oss,
        rope={"truncate": False},  # in all published ones
    ),
    "phi3": Architecture("phi3", more=_phi3, is_partial=True),
    "granite": Architecture(
        "granite", numbers=_RMS | _GRANITE, defaults=dict.fromkeys(_GRANITE, 1.0), tensors=_BIASES
    ),
    "olmo2": Architecture("olmo2", tensors=_ATTENTION_BIAS, more=_olmo2),
    "stablelm": Architecture(
        "stablelm",
        numbers={_LAYER_NORM: "layer_norm_eps"},
        tensors={"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"},
        more=_stablelm,
        heads_vary=False,
        is_partial=True,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        numbers={_LAYER_NORM: "norm_epsilon"},
        fixed={"hidden_act": _GEMMA_GELU, "sliding_window": None},
        tensors={"use_bias": "attn_q.bias"},
    ),
    "nemotron": Architecture(
        "nemotron",
        numbers={_LAYER_NORM: "norm_eps"},
        fixed={"hidden_act": "relu2"},
        tensors=_BIASES,
        more=_nemotron,
        is_partial=True,
    ),
    "falcon": Architecture(
        "falcon",
        names={"num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden_size"},
        numbers={_LAYER_NORM: "layer_norm_epsilon"},
        fixed={"activation": "gelu", "alibi": False, "parallel_attn": True},
        tensors={"bias": "attn_qkv.bias"},
        more=_falcon,
        heads_vary=False,
    ),
    "bloom": Architecture(
        "bloom",
        names={
            "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "max_position_embeddings": "seq_length",
            "intermediate_size": None, "num_key_value_heads": None,
        },
        numbers={_LAYER_NORM: "layer_norm_epsilon"},
        fixed={"apply_residual_connection_post_layernorm": False},
        more=_bloom,
        heads_vary=False,
        rope=None,
    ),
    "gpt2": Architecture(
        "gpt2",
        names={
            "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "max_position_embeddings": "n_positions",
            "hidden_size": "n_embd", "intermediate_size": "n_inner", "num_key_value_heads": None,
        },
        numbers={_LAYER_NORM: "layer_norm_epsilon"},
        fixed={
            "activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
        },
        more=_one_key_per_query,
        heads_vary=False,
        rope=None,
    ),
    "lfm2": Architecture(
        "lfm2",
        numbers={"attention.layer_norm_rms_epsilon": "norm_eps"},
        counts={"shortconv.l_cache": "conv_L_cache"},
        fixed={"block_auto_adjust_ff_dim": False},
        tensors={"conv_bias": "shortconv.conv.bias"},
        more=_lfm2,
        layers_vary=True,
    ),
    "deepseek2": Architecture(
        "deepseek_v2",
        numbers=_RMS | {"expert_weights_scale": "routed_scaling_factor"},
        counts={
            "leading_dense_block_count": "first_k_dense_replace", "attention.kv_lora_rank": "kv_lora_rank",
            "attention.value_length_mla": "v_head_dim", "expert_count": "n_routed_experts",
            "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "n_shared_experts",
        },
        defaults={"expert_weights_scale": 1.0},
        tensors=_BIASES,
        more=_deepseek2,
        is_latent=True,
    ),
}  # fmt: skip
