# SPDX-License-Identifier: Apache-2.0
"""The config of a GGUF file: each key is translated, compared or listed as one without effect, or the file is refused."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from ...errors import first_line
from .architectures import ARCHITECTURES, NORMS, Architecture
from .header import GgufHeader
from .keys import NEEDED, REMEDY, GgufKeys
from .rope import read_rope


TABLE, HEAD = "token_embd.weight", "output.weight"
_BLOCK = re.compile(r"blk\.(\d{1,9})\.")
# Keys, and the names that nearly all configs have for them.
_SIZES = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
}  # fmt: skip
_TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}


def read_config(header: GgufHeader, source: str) -> tuple[PreTrainedConfig, frozenset[str]]:
    """Return the config of a file's model, and the tensors that it was read from, or that need no place.

    Raises:
        ValueError: the architecture or a key is not known, a key is missing, or has a value that no model has.
    """
    architecture = ARCHITECTURES.get(header.architecture)
    if architecture is None:
        raise ValueError(
            f"{source} has the architecture {header.architecture}, and GGUF files are read only with {', '.join(sorted(ARCHITECTURES))}; "
            f"{REMEDY}"
        )
    keys = GgufKeys(header, source)
    found = _read_sizes(keys, architecture)
    found["head_dim"] = _head_dim(keys, architecture, found)
    if architecture.rope is not None:
        head, longest = found["head_dim"], found["max_position_embeddings"]
        found["rope_parameters"] = read_rope(
            keys, head, longest, architecture.rope, is_partial=architecture.is_partial
        )
    for key, name in architecture.numbers.items():
        found[name] = keys.take_number(key, architecture.defaults.get(key, NEEDED))
    for key, value in architecture.same.items():
        keys.require_same(key, value, why=f"all known files of {header.architecture} have {value}")
    for key in NORMS:  # the converter writes both epsilons where a config has both
        keys.take_number(key, 0.0)
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
    except Exception as error:  # transformers has each class make checks
        raise ValueError(
            f"{source}: its keys make no {config_class.__name__} ({first_line(error)}); {REMEDY}"
        ) from error


def _read_sizes(keys: GgufKeys, architecture: Architecture) -> dict[str, Any]:
    """Return the sizes that each config has, and the ids of special tokens, by their common names."""
    header, rows = keys.header, keys.find_tensor(TABLE).shape[0]
    keys.require_same("vocab_size", rows, why=f"{TABLE} has {rows} rows")
    sizes = {name: keys.take_whole(key, least=1) for key, name in _SIZES.items()}
    # Blocks after the last layer guess further tokens: no logit depends on them, and transformers has none.
    layers, heads = (
        sizes["num_hidden_layers"] - keys.take_whole("nextn_predict_layers", 0),
        sizes["num_attention_heads"],
    )
    blocks = {name: int(match[1]) for name in header.tensors if (match := _BLOCK.match(name))}
    further = {name for name, block in blocks.items() if layers <= block < sizes["num_hidden_layers"]}
    if layers < 1 or (further and not any(".nextn." in name for name in further)):
        raise keys.make_refusal("nextn_predict_layers", "so many of its last blocks are layers like the others")
    keys.tensors |= further
    sizes["num_hidden_layers"] = layers
    of_keys = keys.take_layers("attention.head_count_kv", layers, heads)
    if isinstance(of_keys, tuple) and not architecture.layers_vary:
        if len(set(of_keys)) != 1:
            raise keys.make_refusal("attention.head_count_kv", "the layers of this model differ in heads")
        of_keys = of_keys[0]
    return {
        **sizes,
        "num_key_value_heads": of_keys,
        "vocab_size": rows,
        "tie_word_embeddings": HEAD not in header.tensors,
        **{name: _read_token(keys, f"tokenizer.ggml.{key}", rows) for name, key in _TOKENS.items()},
    }


def _read_token(keys: GgufKeys, key: str, rows: int) -> int | None:
    """Return the id of a special token; None where the file has none."""
    value: int | None = keys.take_whole(key, None)
    if value is not None and value >= rows:
        raise keys.make_refusal(key, f"the model has {rows} tokens")
    return value


def _head_dim(keys: GgufKeys, architecture: Architecture, sizes: dict[str, Any]) -> int:
    """Return the dimensions of a head of queries and keys that may be rotated."""
    if architecture.is_latent:
        return int(keys.take_whole("rope.dimension_count", least=1))
    usual = sizes["hidden_size"] // sizes["num_attention_heads"]
    found: int = keys.take_whole("attention.key_length", usual, least=1)
    if found != usual and not architecture.heads_vary:
        raise keys.make_refusal(
            "attention.key_length", f"a {architecture.model_type} of these sizes has heads of {usual}"
        )
    keys.require_same("attention.value_length", found, why=f"transformers has values as wide as keys, {found}")
    return found
