# SPDX-License-Identifier: Apache-2.0
"""What generation_config.json of often used models says, and of some that say what is rare."""

from __future__ import annotations

from typing import Any


PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-2-chat": {"bos_token_id": 1, "do_sample": True, "eos_token_id": 2, "pad_token_id": 0, "temperature": 0.6, "max_length": 4096, "top_p": 0.9},
    "qwen-chat": {
        "chat_format": "chatml", "eos_token_id": 151643, "pad_token_id": 151643, "max_window_size": 24000, "max_new_tokens": 512,
        "do_sample": True, "top_k": 0, "top_p": 0.8, "repetition_penalty": 1.1,
    },
    "qwen2.5-instruct": {
        "bos_token_id": 151643, "pad_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643], "repetition_penalty": 1.05,
        "temperature": 0.7, "top_p": 0.8, "top_k": 20,
    },
    "qwen3": {
        "bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643], "pad_token_id": 151643, "temperature": 0.6, "top_k": 20,
        "top_p": 0.95,
    },
    "mistral-instruct": {"bos_token_id": 1, "eos_token_id": 2},
    "gemma-3-it": {
        "bos_token_id": 2, "cache_implementation": "hybrid", "do_sample": True, "eos_token_id": [1, 106], "pad_token_id": 0, "top_k": 64,
        "top_p": 0.95,
    },
    "granite-instruct": {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
}  # fmt: skip
RARE: dict[str, dict[str, Any]] = {
    "no repeats": {"no_repeat_ngram_size": 2, "eos_token_id": 2},
    "suppressed": {"suppress_tokens": list(range(3, 200)), "begin_suppress_tokens": [220, 250], "eos_token_id": 2},
    "bad words": {"bad_words_ids": [[number] for number in range(100, 290)], "eos_token_id": 2},
    "at least": {"min_new_tokens": 6, "eos_token_id": list(range(3, 300)), "max_new_tokens": 2048},
    "at least so long": {"min_length": 30, "eos_token_id": list(range(3, 300))},
    "what draws": {"do_sample": True, "typical_p": 0.9, "epsilon_cutoff": 3e-4, "eta_cutoff": 1e-3, "min_p": 0.05, "top_k": 0},
    "no numbers": {"do_sample": True, "temperature": 0.0, "top_k": -1, "top_p": 1.0, "pad_token_id": -1, "eos_token_id": -1},
    "beams": {"num_beams": 4, "early_stopping": True, "length_penalty": 2.0, "num_return_sequences": 2, "repetition_penalty": 1.3},
    "for encoders": {"encoder_repetition_penalty": 1.5, "renormalize_logits": True, "remove_invalid_values": True},
    "short": {"max_length": 5, "use_cache": False, "eos_token_id": 2},
    "forced": {"forced_eos_token_id": 2, "exponential_decay_length_penalty": [3, 1.5], "eos_token_id": 2},
}  # fmt: skip
