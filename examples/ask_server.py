# SPDX-License-Identifier: Apache-2.0
"""Stream an answer from a server by OpenAI's client: python examples/ask_server.py http://127.0.0.1:8000 (pip install openai)."""

from __future__ import annotations

import sys

from openai import OpenAI


client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
(model,) = client.models.list()
messages = [{"role": "user", "content": "Name three fruits."}]
for event in client.chat.completions.create(model=model.id, messages=messages, max_tokens=24, stream=True):
    print(event.choices[0].delta.content or "", end="", flush=True)
print()
