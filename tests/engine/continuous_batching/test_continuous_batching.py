# SPDX-License-Identifier: Apache-2.0
"""generate_batch and the manager behave as transformers' own, over this engine."""

from __future__ import annotations

import asyncio
import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import LENGTH, VOCAB, export_tiny, random_tokens
from transformers import ContinuousBatchingConfig, GenerationConfig, GenerationMixin, LogitsProcessorList
from transformers.generation.continuous_batching.requests import RequestStatus

from optimum_neuron import NeuronModelForCausalLM, Request
from optimum_neuron.engine.sampler import RequestSampler


LENGTHS = (5, 21, 9, 1, 30, 13, 17)
GREEDY = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1)


@pytest.fixture(scope="module")
def model(sharp_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> NeuronModelForCausalLM:
    path = export_tiny(sharp_checkpoints["llama"], tmp_path_factory.mktemp("batch") / "artifact")
    return NeuronModelForCausalLM.from_pretrained(path)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [random_tokens(length, seed=length).tolist() for length in LENGTHS]


def by_generate(model: NeuronModelForCausalLM, prompt: list[int], **options: object) -> list[int]:
    sequences = model.generate(torch.tensor([prompt]), generation_config=GREEDY, **options)
    return sequences[0, len(prompt) :].tolist()


def test_the_signature_is_that_of_transformers() -> None:
    own, theirs = (
        inspect.signature(cls.generate_batch).parameters for cls in (NeuronModelForCausalLM, GenerationMixin)
    )
    assert list(own) == list(theirs)
    assert all(own[name].kind == theirs[name].kind for name in theirs)


def test_any_number_of_prompts_get_what_generate_gives_each(
    model: NeuronModelForCausalLM, prompts: list[list[int]]
) -> None:
    outputs = model.generate_batch(prompts, generation_config=GREEDY, record_timestamps=True)
    assert list(outputs) == [f"req_{number}" for number in range(len(prompts))]
    for output, prompt in zip(outputs.values(), prompts, strict=True):
        assert output.generated_tokens == by_generate(model, prompt)
        assert (output.prompt_ids, output.status, output.error) == (prompt, RequestStatus.FINISHED, None)
        assert output.is_finished() and output.logprobs == []
        assert output.timestamps is not None and sorted(output.timestamps) == output.timestamps
        assert output.lifespan == (output.timestamps[0], output.timestamps[-1]) and len(output.timestamps) == 8
    assert model.generate_batch([]) == {}


def test_end_tokens_and_limits_are_those_of_the_config_or_the_keyword(
    model: NeuronModelForCausalLM, prompts: list[list[int]]
) -> None:
    tokens = by_generate(model, prompts[0])
    ending = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=[VOCAB - 1, tokens[3]])
    stop = tokens.index(tokens[3]) + 1
    assert model.generate_batch(prompts[:1], generation_config=ending)["req_0"].generated_tokens == tokens[:stop]
    short = model.generate_batch(prompts[:1], generation_config=GREEDY, max_new_tokens=3)["req_0"]
    assert len(short.generated_tokens) == 3
    unlimited = GenerationConfig(do_sample=False, eos_token_id=-1)
    filled = model.generate_batch(prompts[:1], generation_config=unlimited)["req_0"].generated_tokens
    assert len(filled) == LENGTH - len(prompts[0]) + 1 and filled[:8] == tokens
    by_length = GenerationConfig(max_length=9, do_sample=False, eos_token_id=-1)
    assert len(model.generate_batch(prompts[:1], generation_config=by_length)["req_0"].generated_tokens) == 4


def test_several_sequences_of_a_prompt_come_as_children_before_it(
    model: NeuronModelForCausalLM, prompts: list[list[int]]
) -> None:
    config = GenerationConfig(max_new_tokens=8, do_sample=True, top_k=50, num_return_sequences=3, eos_token_id=-1)

    def run(seed: int) -> list[list[int]]:
        batching = ContinuousBatchingConfig(seed=seed)
        outputs = model.generate_batch(prompts[:2], config, batching)
        assert list(outputs) == [
            f"req_{number}{child}" for number in range(2) for child in ("__child#0", "__child#1", "")
        ]
        return [output.generated_tokens for output in outputs.values()]

    first = run(1)
    assert first == run(1) != run(2)
    assert len({tuple(tokens) for tokens in first}) == 6


def test_processors_of_the_config_are_applied_to_each_request(
    model: NeuronModelForCausalLM, prompts: list[list[int]]
) -> None:
    options = {"repetition_penalty": 1.7, "min_new_tokens": 4}
    config = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=7, **options)
    outputs = model.generate_batch(prompts, generation_config=config)
    for output, prompt in zip(outputs.values(), prompts, strict=True):
        expected = model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :].tolist()
        assert output.generated_tokens == expected


def test_log_probabilities_are_those_of_the_chosen_tokens_whether_graphs_or_the_host_compute_them(
    model: NeuronModelForCausalLM,
    prompts: list[list[int]],
    sharp_checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of logits; where a temperature makes scores of them, the host computes with those."""
    path = export_tiny(sharp_checkpoints["llama"], tmp_path / "out", top_logprobs=0)
    telling = NeuronModelForCausalLM.from_pretrained(path)
    choose, chosen = RequestSampler.choose_token, []
    monkeypatch.setattr(RequestSampler, "choose_token", lambda self, *args: chosen.append(self) or choose(self, *args))
    for temperature in (0.0, 1.0, 0.5):
        draws = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        config = GenerationConfig(max_new_tokens=6, eos_token_id=None, **draws)
        batching = ContinuousBatchingConfig(return_logprobs=True, seed=3)
        for server in (model, telling):
            chosen.clear()
            for found in server.generate_batch(prompts[:3], config, batching).values():
                assert len(found.logprobs) == 6
                for index in (0, 5):
                    ids = torch.tensor([found.prompt_ids + found.generated_tokens[:index]])
                    logits = model(ids, logits_to_keep=1).logits[0, 0] / (temperature or 1.0)
                    expected = torch.log_softmax(logits, -1)[found.generated_tokens[index]]
                    assert abs(found.logprobs[index] - expected) < 1e-4
            assert bool(chosen) == (server is model or temperature == 0.5)


def test_a_prompt_that_cannot_be_served_fails_alone(model: NeuronModelForCausalLM, prompts: list[list[int]]) -> None:
    outputs = model.generate_batch([prompts[0], [5] * 70, [], prompts[1]], generation_config=GREEDY)
    failed = outputs["req_1"]
    assert failed.status == RequestStatus.FAILED and failed.generated_tokens == []
    assert failed.error is not None and "70 tokens" in failed.error and "sequence_length=64" in failed.error
    assert "0 tokens" in str(outputs["req_2"].error)
    assert outputs["req_3"].generated_tokens == by_generate(model, prompts[1])


def test_a_request_that_fails_midway_has_an_error_and_stops_nobody_else(
    model: NeuronModelForCausalLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [by_generate(model, prompt) for prompt in prompts]
    real = model._get_logits_processor

    def evil(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores if input_ids.shape[1] < 12 else scores * float("nan")

    def processors_of(config: GenerationConfig, input_ids_seq_length: int, **options: object) -> LogitsProcessorList:
        processors = real(config, input_ids_seq_length=input_ids_seq_length, **options)
        return LogitsProcessorList([*processors, *([evil] if input_ids_seq_length == 9 else [])])

    monkeypatch.setattr(model, "_get_logits_processor", processors_of)
    outputs = list(model.generate_batch(prompts, generation_config=GREEDY).values())
    with model.continuous_batching_context_manager(generation_config=GREEDY) as manager:
        manager.add_requests(prompts)
        arrived = {output.request_id: output for _ in prompts if (output := manager.get_result(timeout=60))}
    for results in (outputs, [arrived[f"req_{number}"] for number in range(len(prompts))]):
        failed = results[2]
        assert (failed.status, failed.generated_tokens) == (RequestStatus.FAILED, expected[2][:3])
        assert "request 'req_2' failed: no token could be chosen: ValueError" in str(failed.error)
        assert [output.generated_tokens for output in (*results[:2], *results[3:])] == expected[:2] + expected[3:]


@pytest.mark.parametrize(
    ("config", "batching", "words"),
    [
        ({"num_beams": 2}, {}, "num_beams=2 is not supported"),
        ({"guidance_scale": 2.0}, {}, "guidance_scale=2.0 is not supported"),
        ({"output_scores": True}, {}, "output_scores=True is not supported by continuous batching"),
        ({}, {"scheduler_type": "fastest"}, "'fastest' is not known; choose one of fifo, prefill_first"),
        ({}, {"max_batch_tokens": 3}, "max_step_tokens=3 must exceed batch_size=3"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    model: NeuronModelForCausalLM, prompts: list[list[int]], config: dict, batching: dict, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        model.generate_batch(
            prompts, GenerationConfig(max_new_tokens=2, **config), ContinuousBatchingConfig(**batching)
        )
    with pytest.raises(TypeError, match="generate_batch got temprature"):
        model.generate_batch(prompts, generation_config=GREEDY, temprature=1.0)


def test_options_without_a_meaning_are_named(
    model: NeuronModelForCausalLM, prompts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        model.generate_batch(prompts[:1], GREEDY, ContinuousBatchingConfig(num_blocks=3, page_size=64))
    assert "num_blocks, page_size" in caplog.text.replace("page_size, num_blocks", "num_blocks, page_size")


def test_a_kept_engine_reuses_prefixes_until_the_slots_are_used_otherwise(
    model: NeuronModelForCausalLM, prompts: list[list[int]]
) -> None:
    long = prompts[4]
    expected = by_generate(model, long)

    def hits(**options: bool) -> int:
        outputs = model.generate_batch([long], GREEDY, persistent_manager=True, **options)
        assert outputs["req_0"].generated_tokens == expected
        assert model._engine is not None
        return model._engine.statistics.prefix_hit_tokens

    assert [hits(), hits(), hits()] == [0, 29, 58]
    by_generate(model, prompts[0])
    assert hits() == 0
    model.generate_batch([long], GREEDY)
    assert model._engine is None


def test_a_manager_serves_requests_as_they_come(model: NeuronModelForCausalLM, prompts: list[list[int]]) -> None:
    expected = [by_generate(model, prompt) for prompt in prompts]
    with model.continuous_batching_context_manager(generation_config=GREEDY) as manager:
        assert manager.is_running()
        ids = manager.add_requests(prompts[:3])
        assert ids == ["req_0", "req_1", "req_2"]
        assert manager.add_request(prompts[3], request_id="mine", streaming=True) == "mine"
        seen = [output.generated_tokens for output in manager.request_id_iter("mine")]
        assert seen == [expected[3][:count] for count in range(1, 9)]
        results = {
            output.request_id: output for output in (manager.get_result(timeout=30) for _ in range(3)) if output
        }
        assert [results[name].generated_tokens for name in ids] == expected[:3]
        assert manager.get_result(timeout=0.01) is None
        with pytest.raises(RuntimeError, match="slots are in use by a running service"):
            by_generate(model, prompts[0])
        assert manager.add_request([5] * 70) == "req_3"
        failed = manager.get_result("req_3", timeout=30)
        assert failed is not None and "sequence_length=64" in str(failed.error)
        manager.add_request(prompts[4], request_id="long", max_new_tokens=30)
        manager.cancel_request("long")
        cancelled = manager.get_result("long", timeout=30)
        assert cancelled is not None and cancelled.error == "the request was cancelled"
        manager.add_request(prompts[5], request_id="last")
    assert not manager.is_running()
    assert [output.generated_tokens for output in manager] == [expected[5]]
    with pytest.raises(RuntimeError, match="call start"):
        manager.add_request(prompts[0])
    assert by_generate(model, prompts[0]) == expected[0]


def test_a_handler_gets_each_output_of_its_request(model: NeuronModelForCausalLM, prompts: list[list[int]]) -> None:
    async def collect() -> list[int]:
        with model.continuous_batching_context_manager(generation_config=GREEDY) as manager:
            outputs: asyncio.Queue[Any] = asyncio.Queue()
            manager.add_request(prompts[0], request_id="mine", streaming=True)
            manager.register_result_handler("mine", outputs.put_nowait)
            while not (last := await asyncio.wait_for(outputs.get(), 30)).is_finished():
                assert last.error is None
            return last.generated_tokens

    assert asyncio.run(collect()) == by_generate(model, prompts[0])


def test_a_stop_with_a_timeout_or_a_hard_one_ends_what_runs(
    model: NeuronModelForCausalLM, prompts: list[list[int]]
) -> None:
    for options in ({"timeout": 0.01}, {"hard_stop": True}):
        manager = model.init_continuous_batching(generation_config=GREEDY)
        manager.start()
        manager.add_requests([prompts[0]] * 6, max_new_tokens=50)
        manager.stop(**options)
        outputs = list(manager)
        assert len(outputs) == 6 and all(output.error for output in outputs[3:])
        manager.stop()
    assert len(by_generate(model, prompts[0])) == 8


def test_a_manager_whose_engine_failed_ends_every_request_with_an_error(
    model: NeuronModelForCausalLM, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = model.init_continuous_batching(generation_config=GREEDY)
    manager.start()

    def fails(*_: object, **options: object) -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(model.runner, "run_step", fails)
        manager.add_request(prompts[0])
        failed = manager.get_result(timeout=30)
    assert failed is not None and "device lost" in str(failed.error)
    assert not manager.is_running() and "device lost" in str(manager.background_thread_status.fatal_error)
    manager.add_request(prompts[1])
    assert ["closed" in str(output.error) for output in manager] == [True]
    manager.stop()
    assert len(by_generate(model, prompts[0])) == 8


def test_a_model_serves_engine_requests_until_closed(model: NeuronModelForCausalLM, prompts: list[list[int]]) -> None:
    expected = by_generate(model, prompts[1])
    with model.serve() as service:
        stream = service.submit(Request(request_id="a", prompt_token_ids=prompts[1], max_new_tokens=8))
        assert list(stream) == expected
        with pytest.raises(RuntimeError, match="close it first"):
            model.serve()
    assert by_generate(model, prompts[1]) == expected


def test_a_deterministic_model_runs_one_graph(sharp_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = export_tiny(sharp_checkpoints["llama"], tmp_path / "artifact")
    model = NeuronModelForCausalLM.from_pretrained(path, deterministic=True)
    by_generate(model, random_tokens(20).tolist())
    model.generate_batch([random_tokens(20).tolist()] * 3, generation_config=GREEDY)
    assert set(model.runner.graph_calls) == {f"mixed_chunk8_context{LENGTH}"}
    without = export_tiny(sharp_checkpoints["llama"], tmp_path / "without", mixed_step=False)
    with pytest.raises(ValueError, match=r"deterministic=True .* without --no-mixed-step"):
        NeuronModelForCausalLM.from_pretrained(without, deterministic=True)
