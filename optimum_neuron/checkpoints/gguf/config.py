# SPDX-License-Identifier: Apache-2.0
"""The config of a GGUF file: each key is translated, compared or without effect by a list, or the file is refused."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from ...errors import first_line
from .architectures import ARCHITECTURES, NORMS, Architecture
from .header import GgufHeader
from .keys import NEEDED, REMEDY, Keys
from .rope import read_rope


TABLE, HEAD = "token_embd.weight", "output.weight"
_BLOCK = re.compile(r"blk\.(\d{1,9})\.")
# By key what nearly all configs call it.
_SIZES = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
}  # fmt: skip
_TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}


def read_config(header: GgufHeader, source: str) -> tuple[PreTrainedConfig, frozenset[str]]:
    """Return the config of the model that a file holds, and the tensors that it was read from, or that need no place.

    Args:
        source: what the user named, for messages.

    Raises:
        ValueError: the architecture or a key is not known, a key is missing, or has a value that no model has.
    """
    architecture = ARCHITECTURES.get(header.architecture)
    if architecture is None:
        raise ValueError(
            f"{source} is of the architecture {header.architecture}, and GGUF files are read of {', '.join(sorted(ARCHITECTURES))}; "
            f"{REMEDY}"
        )
    keys = Keys(header, source)
    found = _sizes(keys, architecture)
    found["head_dim"] = _head_dim(keys, architecture, found)
    if architecture.rope is not None:
        head, longest = found["head_dim"], found["max_position_embeddings"]
        found["rope_parameters"] = read_rope(
            keys, head, longest, architecture.rope, is_partial=architecture.is_partial
        )
    for key, name in architecture.numbers.items():
        found[name] = keys.number(key, architecture.defaults.get(key, NEEDED))
    for key, value in architecture.same.items():
        keys.same(key, value, why=f"all known files of {header.architecture} have {value}")
    for key in NORMS:  # the converter writes both epsilons where a config has both
        keys.number(key, 0.0)
    for name, ending in architecture.tensors.items():
        found[name] = any(tensor.endswith(f".{ending}") for tensor in header.tensors)
    found |= architecture.fixed
    for more in architecture.more:
        found |= more(keys, found)
    keys.check_all_taken()
    config_class = CONFIG_MAPPING[found.pop("model_type", architecture.model_type)]
    usual = found["hidden_size"] // found["num_attention_heads"]
    if found["head_dim"] == usual and "head_dim" not in {field.name for field in fields(config_class)}:
        del found["head_dim"]
    named = {architecture.names.get(name, name): value for name, value in found.items()}
    try:
        return config_class(**named), frozenset(keys.tensors)
    except Exception as error:  # of checks that transformers has each class make
        raise ValueError(
            f"{source}: its keys make no {config_class.__name__} ({first_line(error)}); {REMEDY}"
        ) from error


def _sizes(keys: Keys, architecture: Architecture) -> dict[str, Any]:
    """The sizes that each config has, and the ids of special tokens, by their common names."""
    header, rows = keys.header, keys.tensor(TABLE).shape[0]
    keys.same("vocab_size", rows, why=f"{TABLE} has {rows} rows")
    sizes = {name: keys.whole(key, least=1) for key, name in _SIZES.items()}
    # Blocks after the last layer guess further tokens: no logit depends on them, and transformers has none.
    layers, heads = sizes["num_hidden_layers"] - keys.whole("nextn_predict_layers", 0), sizes["num_attention_heads"]
    blocks = {name: int(match[1]) for name in header.tensors if (match := _BLOCK.match(name))}
    further = {name for name, block in blocks.items() if layers <= block < sizes["num_hidden_layers"]}
    if layers < 1 or (further and not any(".nextn." in name for name in further)):
        raise keys.refusal("nextn_predict_layers", "so many of its last blocks are layers like the others")
    keys.tensors |= further
    sizes["num_hidden_layers"] = layers
    of_keys = keys.of_layers("attention.head_count_kv", layers, heads)
    if isinstance(of_keys, tuple) and not architecture.layers_vary:
        if len(set(of_keys)) != 1:
            raise keys.refusal("attention.head_count_kv", "the layers of this model differ in heads")
        of_keys = of_keys[0]
    return {
        **sizes,
        "num_key_value_heads": of_keys,
        "vocab_size": rows,
        "tie_word_embeddings": HEAD not in header.tensors,
        **{name: _token(keys, f"tokenizer.ggml.{key}", rows) for name, key in _TOKENS.items()},
    }


def _token(keys: Keys, key: str, rows: int) -> int | None:
    """The id of a special token; None where the file has none."""
    value: int | None = keys.whole(key, None)
    if value is not None and value >= rows:
        raise keys.refusal(key, f"the model has {rows} tokens")
    return value


def _head_dim(keys: Keys, architecture: Architecture, sizes: dict[str, Any]) -> int:
    """The dimensions of a head of queries and keys that may be rotated."""
    if architecture.is_latent:
        return int(keys.whole("rope.dimension_count", least=1))
    usual = sizes["hidden_size"] // sizes["num_attention_heads"]
    found: int = keys.whole("attention.key_length", usual, least=1)
    if found != usual and not architecture.heads_vary:
        raise keys.refusal("attention.key_length", f"a {architecture.model_type} of these sizes has heads of {usual}")
    keys.same("attention.value_length", found, why=f"transformers has values as wide as keys, {found}")
    return found
