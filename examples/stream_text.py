# SPDX-License-Identifier: Apache-2.0
"""Stream the answer to a chat. Running needs no torch, so the first token comes soon after the start."""

from __future__ import annotations

import sys

from optimum_neuron import TextModel


with TextModel.from_pretrained(sys.argv[1]) as model:
    for piece in model.answer([{"role": "user", "content": "Name three fruits."}], max_new_tokens=64):
        print(piece, end="", flush=True)
    print()
