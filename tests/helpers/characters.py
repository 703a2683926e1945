# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: one that reads each of the tiny models' ids but the special ones as a character of its own, and one of bytes."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


WORDS = [
    "Größe und Maß, naïve café.",
    "東京は日本の首都です。",
    "two  spaces, a tab\tand 👩‍👩‍👧 families",
    "कुत्ता और बिल्ली",
]


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def byte_level(size: int, *special: str) -> Tokenizer:
    """As GPT-2's: a token for each byte, and merges of WORDS up to a size, which may end within characters."""
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"initial_alphabet": alphabet, "special_tokens": list(special), "show_progress": False}
    plain.train_from_iterator(WORDS * 3, trainers.BpeTrainer(vocab_size=size, **options))
    return plain


def character_tokenizer() -> PreTrainedTokenizerFast:
    characters = [*map(chr, range(32, 127)), "\n", *map(chr, range(0x100, 0x100 + 201))]
    vocab = {character: index for index, character in enumerate(["<pad>", "<s>", "</s>", *characters])}
    plain = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    plain.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    return fast
