# SPDX-License-Identifier: Apache-2.0
"""Answer more prompts than the artifact has slots. A new one starts as soon as a slot is free."""

from __future__ import annotations

import sys

from transformers import AutoTokenizer

from optimum_neuron import NeuronModelForCausalLM


model = NeuronModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
texts = [f"{number} times {number} is" for number in range(2, 12)]
prompts = [tokenizer(text)["input_ids"] for text in texts]
outputs = model.generate_batch(prompts, max_new_tokens=8)
for text, output in zip(texts, outputs.values(), strict=True):
    print(f"{text}{tokenizer.decode(output.generated_tokens, skip_special_tokens=True)!r}")
