# SPDX-License-Identifier: Apache-2.0
"""No token id that the model does not take reaches a graph, which would end the process; only its own request is refused."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import VOCAB, Opener, Recorder, decode_rows, export_tiny, load_model, random_tokens, tiny_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, OPTConfig

from optimum_neuron import NeuronModelForCausalLM, Request, SamplingParams
from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.core import PromptPiece
from optimum_neuron.engine.engine import Engine
from optimum_neuron.engine.events import Event, TokenEvent
from optimum_neuron.parity.inspect import inspect_model
from optimum_neuron.runtime.lengths import check_token_ids
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.runtime.step_tensors import DecodeRows
from optimum_neuron.step.model_spec import ModelSpec
from optimum_neuron.step.spec import graph_specs


# 2**32 + 5 and -2**32 + 5 are 5 in 32 bits.
OUTSIDE = (-1, VOCAB, 2**31, 2**32 + 5, -(2**32) + 5)
GOOD = [5, 6, 7]


@pytest.fixture(scope="module")
def model(sharp_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> NeuronModelForCausalLM:
    path = export_tiny(sharp_checkpoints["llama"], tmp_path_factory.mktemp("ids") / "artifact")
    return NeuronModelForCausalLM.from_pretrained(path)


def refused(token: int) -> str:
    return rf"has the token id {token}, and the model's are 0 to {VOCAB - 1}"


@pytest.mark.parametrize("token", OUTSIDE)
def test_generate_and_forward_refuse_an_id_before_anything_runs(model: Any, token: int) -> None:
    calls = model.runner.graph_calls.copy()
    prompt = torch.tensor([[5, token, 6, 7]])
    attempts = (
        lambda: model.generate(prompt, max_new_tokens=2),
        lambda: model.generate(input_ids=prompt, max_new_tokens=2),
        lambda: model(prompt),
        lambda: model(prompt, cu_seq_lens_q=torch.tensor([0, 1, 4])),
    )
    for attempt in attempts:
        with pytest.raises(ValueError, match=refused(token)):
            attempt()
    assert model.runner.graph_calls == calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8, torch.int8, torch.int16, torch.float16])
def test_ids_of_another_type_are_refused_and_both_widths_give_the_same_tokens(model: Any, dtype: torch.dtype) -> None:
    for attempt in (lambda ids: model.generate(ids, max_new_tokens=2), model):
        with pytest.raises(TypeError, match=rf"input_ids hold {dtype}; give a tensor of torch.int64"):
            attempt(torch.tensor([GOOD]).to(dtype))

    ids = torch.tensor([GOOD])
    narrow, wide = (model.generate(each, max_new_tokens=6, do_sample=False) for each in (ids.int(), ids))
    assert narrow.dtype == wide.dtype and torch.equal(narrow, wide)


@pytest.mark.parametrize("token", [-1, 2**32 + 5])
def test_one_bad_prompt_of_a_batch_fails_alone(model: Any, token: int) -> None:
    config = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1)
    good = model.generate_batch([GOOD], config)["req_0"].generated_tokens
    outputs = model.generate_batch([GOOD, [5, token], [1.5], None, [True], [[5]], "text", GOOD], config)
    assert [output.generated_tokens for output in outputs.values()] == [good, *[[]] * 6, good]
    assert [output.error is None for output in outputs.values()] == [True, *[False] * 6, True]
    with model.continuous_batching_context_manager(config) as manager:
        manager.add_request(GOOD, request_id="good")
        manager.add_request([5, token], request_id="bad")
        manager.add_request(GOOD, request_id="end", eos_token_id=VOCAB)
        results = {name: manager.get_result(name, timeout=30) for name in ("good", "bad", "end")}
    assert results["good"].generated_tokens == good and results["good"].error is None
    assert str(token) in results["bad"].error and "eos_token_ids=[300]" in results["end"].error


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_token_ids": [True, False]}, {"prompt_token_ids": [1.0]}, {"eos_token_ids": [2.0]},
        {"eos_token_ids": [True]}, {"eos_token_ids": 2}, {"max_new_tokens": 1.5}, {"max_new_tokens": "3"},
        {"priority": "high"}, {"priority": float("nan")}, {"sampling": (5, 0.5, 1.0)},
        {"sampling": SamplingParams("5", 1.0, 1.0)},
    ],
)  # fmt: skip
def test_a_request_of_other_types_cannot_be_made(fields: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"request 'x'.*; give "):
        Request(**{"request_id": "x", "prompt_token_ids": GOOD} | fields)


@pytest.mark.parametrize(
    "options",
    [
        {"forced_eos_token_id": VOCAB}, {"forced_bos_token_id": VOCAB}, {"forced_bos_token_id": -1},
        {"prefix_allowed_tokens_fn": lambda *_: [5, VOCAB]}, {"prefix_allowed_tokens_fn": lambda *_: [-1]},
    ],
)  # fmt: skip
def test_tokens_that_are_forced_are_checked(model: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"has the token id (300|-1), and the model's are 0 to 299"):
        model.generate(torch.tensor([[5]]), max_new_tokens=2, do_sample=False, **options)
    assert model.generate(torch.tensor([[5]]), max_new_tokens=2, do_sample=False).shape == (1, 3)


@pytest.mark.parametrize("width", [5, VOCAB + 10, None])
def test_a_processor_returns_a_score_per_token(model: Any, width: int | None) -> None:
    def resize(_: Tensor, scores: Tensor) -> Tensor | None:
        return None if width is None else scores.new_zeros((len(scores), width))

    with pytest.raises(ValueError, match=r"the logits processors returned .*, not scores of the shape \[1, 300\]"):
        model.generate(torch.tensor([GOOD]), max_new_tokens=2, logits_processor=[resize])


@pytest.mark.parametrize("token", [-1, VOCAB, 2**32])
def test_a_pad_token_is_checked_where_a_row_may_be_padded(model: Any, token: int) -> None:
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": token, "eos_token_id": 2}
    with pytest.raises(ValueError, match=rf"pad_token_id has the token id {token}"):
        model.generate(torch.tensor([GOOD, GOOD]), **options)
    assert model.generate(torch.tensor([GOOD]), **options).shape == (1, 7)  # many checkpoints say -1 for none


@pytest.mark.parametrize("target", ["eager", pytest.param("cpu", marks=pytest.mark.slow)])
def test_no_graph_gets_an_id_whoever_called(open_runner: Opener, target: str) -> None:
    runner = open_runner("llama", target)
    for token in OUTSIDE:
        with pytest.raises(ValueError, match=rf"the chunk of slot 0 has the token id {token}"):
            runner.run_step([PromptPiece(0, np.asarray([5, token]))])
    runner.run_step([PromptPiece(0, random_tokens(5))])
    assert runner.lengths[0] == 5


def test_where_logits_are_wider_than_the_embedding_decodes_are_checked_too() -> None:
    config = tiny_config()
    graphs = graph_specs(config)
    for known, is_refused in ((VOCAB, False), (VOCAB - 1, True)):
        runner = GraphRunner(Recorder(graphs), config, graphs, ModelSpec(VOCAB, (), num_embeddings=known))
        runner.run_step([PromptPiece(0, random_tokens(5))])
        words = r"has the token id 299, and the model's are 0 to 298"
        with pytest.raises(ValueError, match=words) if is_refused else nullcontext():
            runner.run_step((), DecodeRows(*decode_rows(runner, {0: VOCAB - 1})))
        assert runner.lengths.tolist() == [5 if is_refused else 6, 0, 0]


def test_a_request_whose_token_cannot_be_read_back_fails_alone(open_runner: Opener) -> None:
    shared = open_runner("llama")
    prompts = {name: random_tokens(count, seed=count) % 100 for name, count in (("a", 3), ("b", 7))}

    def serve(known: int) -> dict[str, list[Event]]:
        model, graphs = ModelSpec(VOCAB, (), num_embeddings=known), graph_specs(shared.config)
        engine = Engine(GraphRunner(shared.executable, shared.config, graphs, model), vocab_size=VOCAB)
        for name, prompt in prompts.items():
            engine.add_request(Request(request_id=name, prompt_token_ids=prompt, max_new_tokens=6))
        found: dict[str, list[Event]] = {name: [] for name in prompts}
        for event in engine.run_requests():
            told = event._replace(started=None) if isinstance(event, TokenEvent) else event
            found[event.request_id].append(told)
        return found

    largest = {name: max(event.token_id for event in events) for name, events in serve(VOCAB).items()}
    known = max(largest.values())
    assert min(largest.values()) < known
    fails, goes_on = sorted(largest, key=largest.__getitem__, reverse=True)
    found, whole = serve(known), serve(VOCAB)
    assert found[goes_on] == whole[goes_on]
    assert f"cannot continue after token {known}" in str(found[fails][-1].error)


class _SumOfTables(nn.ModuleList):
    """As models with embeddings per layer: a second table of the same tokens."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return self[0](input_ids) + self[1](input_ids)


def test_the_ids_that_a_model_takes_are_those_of_its_smallest_table(tiny_checkpoint: Path) -> None:
    model: Any = load_model(tiny_checkpoint)
    table = model.model.embed_tokens
    model.model.embed_tokens = nn.Embedding(VOCAB + 8, table.embedding_dim)
    spec = inspect_model(model)
    assert (spec.vocab_size, spec.num_embeddings) == (VOCAB, VOCAB + 8)
    for rows in (VOCAB - 20, VOCAB + 20):
        model.model.embed_tokens = _SumOfTables([table, nn.Embedding(rows, table.embedding_dim)])
        assert inspect_model(model).num_embeddings == min(rows, VOCAB)


def test_a_table_of_positions_bounds_no_ids(tmp_path: Path) -> None:
    sizes = dict.fromkeys(("hidden_size", "ffn_dim", "word_embed_proj_dim"), 32) | {"num_attention_heads": 2}
    config = OPTConfig(**sizes, num_hidden_layers=1, vocab_size=VOCAB, max_position_embeddings=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert inspect_model(load_model(tmp_path)).num_embeddings == VOCAB


def test_ids_that_have_no_logit_are_taken_as_transformers_takes_them(tiny_checkpoint: Path, tmp_path: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    spec = ModelSpec(VOCAB, (), num_embeddings=VOCAB + 8)
    assert ModelSpec.from_dict(spec.to_dict()) == spec
    without = {name: value for name, value in spec.to_dict().items() if name != "num_embeddings"}
    assert ModelSpec.from_dict(without).num_embeddings == VOCAB
    path = export_tiny(tiny_checkpoint, tmp_path / "artifact")
    assert Artifact.open(path).model.num_embeddings == reference.get_input_embeddings().num_embeddings


def test_no_ids_at_all_are_in_order() -> None:
    check_token_ids(np.zeros(0), 5, "nothing")
    with pytest.raises(TypeError, match=r"it holds float64 values; give whole numbers from 0 to 4"):
        check_token_ids(np.asarray([1.0]), 5, "it")
