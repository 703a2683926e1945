# SPDX-License-Identifier: Apache-2.0
"""Send requests from several threads to one service. Each step advances all of them, whatever their settings."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from transformers import AutoTokenizer

from optimum_neuron import NeuronModelForCausalLM, Request, SamplingParams


model = NeuronModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
prompt = tokenizer("Once upon a time")["input_ids"]

with model.serve() as service:

    def ask(temperature: float) -> str:
        sampling = SamplingParams(temperature=temperature, top_p=0.9)
        request = Request(
            request_id=str(temperature), prompt_token_ids=prompt, max_new_tokens=24, sampling=sampling, seed=1
        )
        return tokenizer.decode(list(service.submit(request)), skip_special_tokens=True)

    temperatures = (0.5, 0.8, 1.1)
    with ThreadPoolExecutor() as threads:
        for temperature, text in zip(temperatures, threads.map(ask, temperatures), strict=True):
            print(f"temperature {temperature}: {text!r}")
