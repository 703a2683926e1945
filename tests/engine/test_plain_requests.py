# SPDX-License-Identifier: Apache-2.0
"""Requests made without transformers are those that transformers' rules make, or are left to these."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import examples, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from published_defaults import PUBLISHED, RARE
from tiny import TINY_CONFIGS
from transformers import GenerationConfig

from optimum_neuron.core import Request
from optimum_neuron.engine.continuous_batching.requests import RequestFactory
from optimum_neuron.engine.plain_requests import DEFAULTS_NAME, PlainRequests, RequestMaker, read_plain_defaults
from optimum_neuron.runtime.defaults import Defaults, in_vocabulary, usable


SIZES = tiny_config(output_logits=True)
SPEC: Any = SimpleNamespace(vocab_size=300, num_embeddings=300)
KEYWORDS: Any = st.fixed_dictionaries(
    {},
    optional={
        "do_sample": st.booleans(),
        "temperature": st.sampled_from([0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([1, 7, 50]),
        "top_p": st.sampled_from([0.2, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1, 0.5]),
    },
)
FILES = st.builds(
    lambda choices, others: {"eos_token_id": 2, **choices, **others},
    KEYWORDS,
    st.fixed_dictionaries(
        {},
        optional={
            "eos_token_id": st.sampled_from([5, [2, 7], [2, -1, 900]]),
            "top_k": st.sampled_from([None, -1, 0, 3]),
            "temperature": st.sampled_from([0.0, 0.6, None]),
            "max_new_tokens": st.sampled_from([4, 10_000]),
            "max_length": st.sampled_from([2, 20, 10_000]),
            "repetition_penalty": st.sampled_from([1.0, 1.1]),
            "num_beams": st.just(1),
            "pad_token_id": st.just(0),
        },
    ),
)


def plain_of(folder: Path, file: Mapping[str, Any], asked: Mapping[str, Any]) -> PlainRequests | None:
    (folder / DEFAULTS_NAME).write_text(json.dumps(file), encoding="utf-8")
    artifact: Any = SimpleNamespace(path=folder, manifest={"files": {DEFAULTS_NAME: ""}}, config=SIZES, model=SPEC)
    defaults = read_plain_defaults(artifact)
    return None if defaults is None else PlainRequests(artifact, defaults, asked, lambda: by_transformers(file, asked))


def by_transformers(file: Mapping[str, Any], asked: Mapping[str, Any]) -> RequestMaker:
    found = in_vocabulary(usable(GenerationConfig.from_dict(dict(file)), SIZES)[0], SPEC)
    rules: Any = Defaults(TINY_CONFIGS["llama"](), found, SIZES)
    rules.artifact = SimpleNamespace(model=SPEC)
    return RequestFactory(rules, GenerationConfig(**asked), None, cuts_text=True)


FACTS = "max_new_tokens eos_token_ids sampling seed do_sample processors logprobs"


def facts_of(request: Request) -> list[Any]:
    return [request.prompt_token_ids.tolist(), *(getattr(request, name) for name in FACTS.split())]


@given(file=FILES, asked=KEYWORDS, sampling=KEYWORDS, prompt=st.integers(1, 30), most=st.sampled_from([None, 3]))
@examples(150)
def test_a_request_is_the_one_that_transformers_makes(
    tmp_path_factory: pytest.TempPathFactory,
    file: dict[str, Any],
    asked: dict[str, Any],
    sampling: dict[str, Any],
    prompt: int,
    most: int | None,
) -> None:
    plain = plain_of(tmp_path_factory.mktemp("file"), file, asked)
    if file.get("repetition_penalty") == 1.1:
        assert plain is None
        return
    assert plain is not None
    full = by_transformers(file, asked)
    assert plain.eos_token_ids == full.eos_token_ids and plain.new_tokens(prompt) == full.new_tokens(prompt)
    ids = list(range(3, 3 + prompt))
    made = plain.make_request("r", ids, most, sampling=sampling, seed=4)
    assert facts_of(made) == facts_of(full.make_request("r", ids, most, sampling=sampling, seed=4))


def test_published_files_mean_the_same_and_most_need_no_transformers(tmp_path: Path) -> None:
    plain = {name: plain_of(tmp_path, {"eos_token_id": 2, **file}, {}) for name, file in (PUBLISHED | RARE).items()}
    for name, made in plain.items():
        if made is not None:
            expected = by_transformers({"eos_token_id": 2, **(PUBLISHED | RARE)[name]}, {}).make_request(
                "r", [3, 4], None
            )
            assert facts_of(made.make_request("r", [3, 4], None)) == facts_of(expected), name
    assert sum(plain[name] is not None for name in PUBLISHED) >= len(PUBLISHED) / 2


def test_a_request_that_asks_for_more_is_made_by_transformers(tmp_path: Path) -> None:
    plain = plain_of(tmp_path, {"eos_token_id": 2}, {})
    assert plain is not None
    request = plain.make_request("r", [3, 4], 5, sampling={"repetition_penalty": 1.3})
    assert [type(each).__name__ for each in request.processors] == ["RepetitionPenaltyLogitsProcessor"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 2},
        {"top_p": 3},
        {"top_k": 1.5},
        {"do_sample": 1},
        {"eos_token_id": "x"},
        {"stop_strings": ["a"]},
        {"max_new_tokens": 0},
    ],
    ids=str,
)
def test_a_file_with_other_values_is_left_to_transformers(tmp_path: Path, wrong: dict[str, Any]) -> None:
    assert plain_of(tmp_path, {"eos_token_id": 2} | wrong, {}) is None
