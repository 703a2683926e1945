# SPDX-License-Identifier: Apache-2.0
"""Defaults that are read without transformers are those that transformers' own rule gives, and tokens follow them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import Opener, examples, generate, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from tampering import write
from transformers import GenerationConfig, LlamaConfig

from optimum_neuron.engine.continuous_batching.requests import end_token_ids
from optimum_neuron.runtime.defaults import Defaults, in_vocabulary, processors_of, stop_strings, usable
from optimum_neuron.runtime.plain_defaults import DEFAULTS_NAME, parse_defaults
from optimum_neuron.runtime.token_choice import OnDeviceChoice, choose_how
from optimum_neuron.runtime.token_generator import TokenGenerator
from optimum_neuron.step.model_spec import ModelSpec


VOCAB = 300
CONFIG = tiny_config(output_logits=False)
MODEL = ModelSpec(VOCAB, (), num_embeddings=VOCAB)
PROMPT = np.arange(3, 12, dtype=np.int32)
TAKEN: dict[str, Any] = {
    "eos_token_id": st.one_of(st.integers(-1, 400), st.lists(st.integers(-1, 400), min_size=1, max_size=3)),
    "do_sample": st.booleans(),
    "temperature": st.floats(0.01, 5),
    "top_k": st.integers(0, 2**30),
    "top_p": st.floats(0, 1),
    "min_p": st.floats(0, 1),
    "max_new_tokens": st.integers(1, 100),
    "max_length": st.integers(1, 100),
    "stop_strings": st.one_of(st.text(min_size=1), st.lists(st.text(min_size=1), max_size=2)),
    "max_time": st.floats(0, 100),
    "pad_token_id": st.integers(0, 400),
    "use_cache": st.booleans(),
    "transformers_version": st.just("5.19.0"),
}
OTHERS: dict[str, Any] = {
    "repetition_penalty": 1.2, "num_beams": 4, "typical_p": 0.9, "suppress_tokens": [3], "num_return_sequences": 2, "eos_token_id": None,
    "min_new_tokens": 3, "temperature": 0.0, "top_k": -1, "bad_words_ids": [[4]], "renormalize_logits": True, "top_h": 0.5,
}  # fmt: skip
FILES = st.fixed_dictionaries({"eos_token_id": TAKEN["eos_token_id"]}, optional={k: v for k, v in TAKEN.items() if k != "eos_token_id"})  # fmt: skip


@examples(200)
@given(FILES)
def test_they_are_those_of_transformers(file: dict[str, Any]) -> None:
    found = parse_defaults(json.dumps(file).encode(), VOCAB)
    assert found is not None
    config = in_vocabulary(usable(GenerationConfig.from_dict(file), CONFIG)[0], MODEL)
    rules = Defaults(LlamaConfig(), config, CONFIG)
    settled = rules.settled()
    model: Any = SimpleNamespace(config=LlamaConfig(eos_token_id=None), artifact=SimpleNamespace(model=MODEL))
    processors = processors_of(rules, settled, PROMPT)
    choice = choose_how(processors, CONFIG, do_sample=bool(settled.do_sample), keep_scores=False, keep_logits=False)
    assert isinstance(choice, OnDeviceChoice) and found.choose_sampling({}) == choice.sampling
    settled = rules.settled()  # special tokens have become tensors
    assert found.eos_token_ids == end_token_ids(settled, model)
    assert found.stop_strings == stop_strings(settled) and found.max_time == settled.max_time
    most = CONFIG.sequence_length - PROMPT.size + 1
    asked = rules.new_tokens(settled, PROMPT.size)
    assert found.count_new_tokens(PROMPT.size, CONFIG) == (most if asked is None else asked)


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_that_asks_for_more_is_left_to_transformers(name: str) -> None:
    plain = {"eos_token_id": 2, "do_sample": True}
    assert parse_defaults(json.dumps(plain).encode(), VOCAB) is not None
    assert parse_defaults(json.dumps(plain | {name: OTHERS[name]}).encode(), VOCAB) is None


def test_tokens_are_streamed_up_to_an_end_token(
    cpu_artifact: Callable[[str], Path], open_runner: Opener, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(cpu_artifact("llama"), tmp_path / "artifact"))
    expected, _ = generate(open_runner("llama"), PROMPT, 12)
    end = expected.index(expected[5])
    file = {"eos_token_id": expected[5], "do_sample": True, "top_k": 5, "max_new_tokens": 4}
    write(path, DEFAULTS_NAME, json.dumps(file).encode())
    generator = TokenGenerator.open(path)
    greedy = generator.stream_tokens(PROMPT, max_new_tokens=12, temperature=0)
    assert next(greedy) == expected[0]  # the rest is dropped, and the slot is free again
    assert list(generator.stream_tokens(PROMPT, max_new_tokens=12, temperature=0)) == expected[: end + 1]
    drawn = [list(generator.stream_tokens(PROMPT, seed=seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] and 1 <= len(drawn[2]) <= 4
    with pytest.raises(ValueError, match="do not fit sequence_length=64"):
        next(generator.stream_tokens(PROMPT, max_new_tokens=60))
    write(path, DEFAULTS_NAME, json.dumps(file | {"num_beams": 2}).encode())
    with pytest.raises(ValueError, match="load it by NeuronModelForCausalLM"):
        TokenGenerator.open(path)
