# SPDX-License-Identifier: Apache-2.0
"""Keys of a config.json that its transformers class does not read, though they say how other models compute."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


# Words of the keys by which configs of transformers say how a model computes. Sizes are left to the shapes of weights.
_COMPUTES = re.compile(
    r"rope|rotary|theta|alibi|nope|pos(?:ition)?_emb|sinusoid|window|sliding|chunk|layer_type|block_type|only_layers|dense_replace|"
    r"soft_?cap|capping|scal|multiplier|mscale|factor|clip|clamp|limit|residual|head_dim|num_(?:\w+_)?heads|n_head|kv_|eps(?=ilon|_|$)|"
    r"(?<![a-z])act(?=ivation|_|$)|gat(?:e|ing)|glu|norm|bias|expert|moe|router|routed|scoring|top_?k|group|attention|attn|qkv?_|query|"
    r"tie_|sink|mup|softmax|logit|causal|bidirectional|parallel|ssm|conv|time_step|lora_rank|sparse|index_|compress|architecture$"
)
# Keys about training, other tasks, memory, kernels, or how a program runs: no logit depends on it.
_HARMLESS = re.compile(
    r"drop|(?<!sink_)init|loss|jitter|aux|token|_ids?$|version|dtype|name|auto_map|(?<!_L_)cache|gradient|checkpointing|training|label|"
    r"summary|output_(?:router|hidden|attention)|implementation|mamba_kernels|fused?_|fusion|fp32|flash|quantization|finetuned|seq_?len|"
    r"seq_length|max_position|model_max|context|_tp$|ep_size|tp_size|parallel_?embedding|freeze|grouped_mm|layout|multiple_of|"
    r"transformers|nextn|skip_bias_add|offset_alibi|rescale_prenorm|architectures$"
)
# Values that describe what a class computes anyway, by type of model.
_AS_COMPUTED: dict[str, dict[str, tuple[Any, ...]]] = {
    "cohere2": {
        "layer_switch": (4,), "order_of_interleaved_layers": ("local_attn_first",), "position_embedding_type": ("rope_gptj",),
        "use_gated_activation": (True,), "use_parallel_block": (True,),
    },
    "deepseek_v2": {"scoring_func": ("softmax",)},
    "deepseek_v3": {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    "glm4_moe": {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    "gptj": {"rotary": (True,), "scale_attn_weights": (True,)},
    "mamba": {"rms_norm": (True,)},
    "starcoder2": {"activation_function": ("gelu",), "norm_type": ("layer_norm",), "scale_attn_weights": (True,)},
}  # fmt: skip
# Spellings of one type of rope.
_ROPE_TYPES = {"su": "longrope", "mrope": "default"}
_ROPE = ("rope_scaling", "rope_parameters")


def unread_keys(document: Mapping[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """Return the keys of a config.json that say how a model computes, and that the config's class does not read, with their values.

    A value says nothing if it switches something off, or if a key of the same meaning has it too.
    """
    known = _KnownKeys(config)
    as_computed = _AS_COMPUTED.get(config.model_type, {})

    def says_nothing(value: Any) -> bool:
        if isinstance(value, list) and set(map(str, value)) == {"full_attention"}:
            return True
        return value is None or value is False or (value is not True and value in (0, 1, "", [], {}))

    found = {
        name: value
        for name, value in document.items()
        if name != "rope_theta"
        and not (name in _ROPE and isinstance(value, Mapping))
        and _COMPUTES.search(name)
        and not _HARMLESS.search(name)
        and not says_nothing(value)
        and not ("window" in name and document.get("use_sliding_window") is False)
        and value not in as_computed.get(name, ())
        and not known.reads(name)
        and not known.has_alike(name, value)
    }
    return found | dict(known.unread_rope(document))


class _KnownKeys:
    def __init__(self, config: PreTrainedConfig) -> None:
        self._config = config
        self._fields = {*getattr(type(config), "__dataclass_fields__", ()), *config.attribute_map}
        self._words = {name: set(_COMPUTES.findall(name)) for name in self._fields}
        self._named = _named_by(type(config).__module__)
        has_rope = "rope_parameters" in self._fields | self._named
        self._rope = _flat_members(getattr(config, "rope_parameters", None)) if has_rope else []
        kinds = {each for key, each in self._rope if key == "rope_type"}
        functions = (inspect.getsource(each) for kind, each in ROPE_INIT_FUNCTIONS.items() if kind in kinds)
        self._named_of_rope = self._named.union(*map(_names_in, functions))

    def reads(self, name: str) -> bool:
        """Return whether the class or its model's code names a key, or takes it out of its input."""
        return name in self._fields or not hasattr(self._config, name) or name in self._named

    def has_alike(self, name: str, value: Any) -> bool:
        """Return whether a key that is read, of the same meaning by its words, has the value too."""
        config = self._config
        words = set(_COMPUTES.findall(name))
        read = {each: getattr(config, each, None) for each, own in self._words.items() if words & own}
        if words & {"rope", "rotary", "theta"}:
            read |= {key: each for key, each in self._rope if key in self._named_of_rope}
        if "num_heads" in words:
            read["num_attention_heads"] = getattr(config, "num_attention_heads", None)
        if "head_dim" in words and getattr(config, "hidden_size", None) and config.num_attention_heads:
            read["head_dim of sizes"] = config.hidden_size // config.num_attention_heads
        return any(type(each) is type(value) and each == value for each in read.values())

    def unread_rope(self, document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield members of the document's rope that the config lacks, or that its type of rope does not read."""
        given = [("rope_theta", "rope_theta", document.get("rope_theta"))]
        given += [(f"{part}.{key}", key, each) for part in _ROPE for key, each in _flat_members(document.get(part))]
        for name, key, value in given:
            if value is None:
                continue
            own = [each for other, each in self._rope if other == ("rope_type" if key == "type" else key)]
            if not self._rope:
                is_read = self.reads(name.partition(".")[0])
            elif key in ("type", "rope_type"):
                is_read = _ROPE_TYPES.get(str(value), value) in own
            else:
                is_read = value in own and (key == "rope_theta" or key in self._named_of_rope)
            if not is_read and not _HARMLESS.search(key):
                yield name, value


def _flat_members(document: object) -> list[tuple[str, Any]]:
    """Return an object's keys and values, with those of inner objects in the place of the objects."""
    found: list[tuple[str, Any]] = []
    for key, value in document.items() if isinstance(document, Mapping) else ():
        found += _flat_members(value) if isinstance(value, Mapping) else [(key, value)]
    return found


@cache
def _named_by(module: str) -> frozenset[str]:
    """Return keys in the code of a config's module and of the models in its folder, in which `self` is no config."""
    path = Path(str(sys.modules[module].__file__))
    own = path.read_text(encoding="utf-8").replace("self.", "config.")
    models = path.parent.glob(path.name.replace("configuration_", "modeling_"))
    return _names_in(own).union(*(_names_in(each.read_text(encoding="utf-8")) for each in models if each != path))


def _names_in(source: str) -> frozenset[str]:
    return frozenset(re.findall(r"config\.(\w+)", source) + re.findall(r"[\"'](\w+)[\"']", source))
