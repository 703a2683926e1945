# SPDX-License-Identifier: Apache-2.0
"""A tokenizer that reads each of the tiny models' ids but the special ones as a character of its own: answers come back as they were."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def character_tokenizer() -> PreTrainedTokenizerFast:
    characters = [*map(chr, range(32, 127)), "\n", *map(chr, range(0x100, 0x100 + 201))]
    vocab = {character: index for index, character in enumerate(["<pad>", "<s>", "</s>", *characters])}
    plain = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    plain.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    return fast
