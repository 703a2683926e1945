# SPDX-License-Identifier: Apache-2.0
"""Text in, text out: the tokens of `generate`, without torch where the graphs do all that a request needs."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from characters import character_tokenizer
from helpers import LENGTH, export_tiny, python_process

from optimum_neuron import NeuronModelForCausalLM, TextModel
from optimum_neuron.artifact.artifact import ArtifactError


ASKED = [{"role": "user", "content": "Say something"}]
DEFAULTS = {"eos_token_id": 2, "max_new_tokens": 9}
COMMAND = """
import sys
from optimum.commands.optimum_cli import main

sys.argv = ["optimum-cli", "neuron", *sys.argv[1:]]
main()
sys.exit(" and ".join({"torch", "transformers"} & sys.modules.keys()) or 0)
"""


@pytest.fixture(scope="module")
def export(sharp_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Exports a Llama with a tokenizer of characters and a generation_config.json."""

    def make(**defaults: Any) -> Path:
        folder = tmp_path_factory.mktemp("text")
        checkpoint = Path(shutil.copytree(sharp_checkpoints["llama"], folder / "checkpoint"))
        character_tokenizer().save_pretrained(checkpoint)
        (checkpoint / "generation_config.json").write_text(json.dumps(DEFAULTS | defaults))
        return export_tiny(checkpoint, folder / "artifact", target="cpu")

    return make


@pytest.fixture(scope="module")
def artifact(export: Callable[..., Path]) -> Path:
    return export()


@pytest.fixture
def model(artifact: Path) -> Iterator[TextModel]:
    with TextModel.from_pretrained(artifact) as loaded:
        yield loaded


def by_generate(path: Path, ids: list[int], **options: Any) -> str:
    tokens = NeuronModelForCausalLM.from_pretrained(path).generate(torch.tensor([ids]), **options)[0, len(ids) :]
    return character_tokenizer().decode(tokens, skip_special_tokens=True)


def test_an_answer_has_the_tokens_of_generate(model: TextModel, artifact: Path) -> None:
    ids = character_tokenizer().apply_chat_template(ASKED, add_generation_prompt=True)["input_ids"]
    answer = model.answer(ASKED)
    assert answer.prompt_tokens == len(ids)
    expected = by_generate(artifact, ids)
    assert "".join(answer) == expected and len(answer.times) == 9 and answer.ending == "length"
    # The same by its tokens and as a text, and by how many are asked for.
    assert "".join(model.answer(ids)) == "".join(model.answer(character_tokenizer().decode(ids))) == expected
    assert "".join(model.answer(ids, max_new_tokens=3)) == expected[:3]


def test_answers_are_read_at_the_same_time(model: TextModel) -> None:
    alone = ["".join(model.answer(text)) for text in ("one", "two, longer")]
    both = [model.answer(text) for text in ("one", "two, longer")]
    assert ["".join(each) for each in both] == alone


def test_a_seed_repeats_an_answer_and_sampling_changes_it(model: TextModel) -> None:
    drawn = ["".join(model.answer(ASKED, do_sample=True, temperature=3.0, seed=seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_defaults_that_need_transformers_hold_too(export: Callable[..., Path]) -> None:
    path = export(repetition_penalty=1.7)
    with TextModel.from_pretrained(path) as model:
        ids = model.encode_prompt(ASKED)
        assert "".join(model.answer(ASKED)) == by_generate(path, ids) != by_generate(path, ids, repetition_penalty=1.0)
        stop = "".join(model.answer(ASKED))[4]
    stopped = export(stop_strings=[stop])
    with TextModel.from_pretrained(stopped) as model:
        whole = by_generate(stopped, ids, stop_strings=None)
        assert "".join(model.answer(ASKED)) == whole.partition(stop)[0]


def test_a_call_may_ask_for_more_than_the_graphs_do(model: TextModel, artifact: Path) -> None:
    ids = np.asarray(model.encode_prompt(ASKED))
    expected = by_generate(artifact, ids.tolist(), repetition_penalty=1.7)
    assert "".join(model.answer(ids, repetition_penalty=1.7)) == expected != "".join(model.answer(ids))


def test_what_cannot_be_answered_says_why(model: TextModel, artifact: Path, tmp_path: Path) -> None:
    long, broken = "x" * (LENGTH + 1), "surrogates not allowed"
    for text, words in ((long, f"not fit sequence_length={LENGTH}"), ("", "has 0 tokens"), ("\udc80", broken)):
        with pytest.raises(ValueError, match=words):
            model.answer(text)
    with pytest.raises(TypeError, match=r"unknown option 'temprature' = 0\.5; did you mean 'temperature'"):
        model.answer(ASKED, temprature=0.5)
    with pytest.raises(TypeError, match="unknown option 'adapter'"):
        TextModel.from_pretrained(artifact, adapter="a")
    _ = model.answer(ASKED)
    with pytest.raises(RuntimeError, match="in use by a running service"):
        model.serve()
    changed = Path(shutil.copytree(artifact, tmp_path / "broken"))
    (changed / "tokenizer.json").unlink()
    with pytest.raises((ArtifactError, FileNotFoundError), match=r"tokenizer\.json"):
        TextModel.from_pretrained(changed)
    with pytest.raises(FileNotFoundError):
        TextModel.from_pretrained(tmp_path / "nothing")


def test_commands_answer_without_torch(artifact: Path, model: TextModel) -> None:
    question, expected = ASKED[0]["content"], "".join(model.answer(ASKED))
    process = python_process(COMMAND, "generate", artifact, "--prompt", question)
    output, errors = process.communicate(timeout=100)
    assert (output, process.returncode) == (expected + "\n", 0) and "TTFT, ms" in errors, errors
    process = python_process(COMMAND, "chat", artifact)
    output, errors = process.communicate(question + "\n", timeout=100)
    assert expected in output and process.returncode == 0, errors
    process = python_process(COMMAND, "serve", artifact, "--port", "0", "--backend", "engine")
    assert process.stderr is not None
    while not (found := re.search(r"at (http://\S+/v1):", line := process.stderr.readline())):
        assert line, process.wait()
    body = {"model": str(artifact), "messages": ASKED}
    answer = httpx2.post(f"{found[1]}/chat/completions", json=body, timeout=100).json()
    process.send_signal(signal.SIGTERM)
    assert answer["choices"][0]["message"]["content"] == expected
    assert process.wait(100) == 0, process.stderr.read()
