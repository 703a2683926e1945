# SPDX-License-Identifier: Apache-2.0
"""Compute the perplexity of a text. The artifact has logits of whole prompts: optimum-cli export neuron ... --prompt-logits."""

from __future__ import annotations

import sys

from transformers import AutoTokenizer

from optimum_neuron import NeuronModelForCausalLM


model = NeuronModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
inputs = tokenizer("A model predicts each token from those before it.", return_tensors="pt")
loss = model(**inputs, labels=inputs["input_ids"]).loss
print(f"perplexity {loss.exp().item():.1f}")
