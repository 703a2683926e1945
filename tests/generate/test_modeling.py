# SPDX-License-Identifier: Apache-2.0
"""NeuronModelForCausalLM behaves as transformers users expect, and equals transformers in float32."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

from optimum_neuron import NeuronConfig, NeuronModelForCausalLM, export_model
from optimum_neuron.runtime.arguments import refuse_other_options


SIZES: dict[str, Any] = {"batch_size": 4, "sequence_length": 64, "prefill_chunk_size": 8, "target": "eager"}
SIZES["prefill_chunk_buckets"] = (4,)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}
SAMPLED: dict[str, Any] = GREEDY | {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8}


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)


@pytest.fixture(scope="module")
def artifact(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without decode logits: tokens come from the on-device sampler."""
    return export_model(tiny_checkpoint, tmp_path_factory.mktemp("out") / "plain", config=NeuronConfig(**SIZES))


@pytest.fixture(scope="module")
def model(artifact: Path) -> NeuronModelForCausalLM:
    return NeuronModelForCausalLM.from_pretrained(artifact)


@pytest.fixture(scope="module")
def logits_model(tiny_checkpoint: Path) -> NeuronModelForCausalLM:
    return NeuronModelForCausalLM.from_pretrained(tiny_checkpoint, export=True, **SIZES, output_logits=True)


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_checkpoint)


def padded(tokenizer: Any, side: str) -> dict[str, torch.Tensor]:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side = side
    return tokenizer(["a", "hello world", "long prompts take several chunks"], return_tensors="pt", padding=True)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 25, 56, 64])
def test_greedy_tokens_equal_transformers_up_to_a_full_cache(model: Any, reference: Any, length: int) -> None:
    ids, options = torch.randint(3, 300, (1, length)), GREEDY | {"max_new_tokens": min(8, 65 - length)}
    assert torch.equal(model.generate(ids, **options), reference.generate(ids, **options))


@pytest.mark.parametrize("side", ["left", "right"])
def test_ragged_batches_equal_single_runs_whichever_side_is_padded(model: Any, tokenizer: Any, side: str) -> None:
    batch = padded(tokenizer, side)
    width = batch["input_ids"].shape[1]
    together = model.generate(**batch, **GREEDY)
    assert torch.equal(together[:, :width], batch["input_ids"])
    for row, mask in enumerate(batch["attention_mask"]):
        alone = model.generate(batch["input_ids"][row][mask.bool()][None], **GREEDY)
        assert torch.equal(together[row, width:], alone[0, int(mask.sum()) :])


def test_host_sampling_with_a_seed_gives_the_tokens_of_transformers(logits_model: Any, reference: Any) -> None:
    ids = torch.randint(3, 300, (2, 11))
    options = SAMPLED | {"repetition_penalty": 1.3, "min_new_tokens": 2, "num_return_sequences": 2}
    torch.manual_seed(5)
    ours = logits_model.generate(ids, **options)
    torch.manual_seed(5)
    assert torch.equal(ours, reference.generate(ids, **options))


def test_a_seed_reproduces_on_device_samples_and_another_seed_does_not(model: Any) -> None:
    ids = torch.randint(3, 300, (2, 11))
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(model.generate(ids, **SAMPLED | {"max_new_tokens": 20}))
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_num_return_sequences_uses_a_slot_each(model: Any) -> None:
    ids = torch.randint(3, 300, (2, 5))
    assert model.generate(ids, **SAMPLED, num_return_sequences=2).shape == (4, 13)
    with pytest.raises(ValueError, match=r"6 rows .* batch_size=4"):
        model.generate(ids, **SAMPLED, num_return_sequences=3)


def test_streamers_get_every_token_in_order(model: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    batch = tokenizer("hello", return_tensors="pt")
    text = tokenizer.decode(model.generate(**batch, **GREEDY)[0, 5:], skip_special_tokens=True)
    model.generate(**batch, **GREEDY, streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
    assert capsys.readouterr().out == text + "\n"
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    with ThreadPoolExecutor() as pool:
        pool.submit(model.generate, **batch, **GREEDY, streamer=streamer)
        assert "".join(streamer) == text


def test_stop_strings_end_generation_as_in_transformers(model: Any, reference: Any, tokenizer: Any) -> None:
    batch = tokenizer("stop here", return_tensors="pt")
    free = reference.generate(**batch, **GREEDY)[0, -4:]
    options = GREEDY | {"stop_strings": [tokenizer.decode(free[:2])], "tokenizer": tokenizer}
    assert torch.equal(model.generate(**batch, **options), reference.generate(**batch, **options))


def test_custom_logits_processors_are_applied_or_refused(model: Any, logits_model: Any) -> None:
    def choose(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -1e9).index_fill(1, torch.tensor([42]), 0.0)

    ids = torch.randint(3, 300, (2, 5))
    assert (logits_model.generate(ids, **GREEDY, logits_processor=[choose])[:, 5:] == 42).all()
    with pytest.raises(ValueError, match=r"function is applied to logits .* --output-logits"):
        model.generate(ids, **GREEDY, logits_processor=[choose])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repetition_penalty": 1.5}, "RepetitionPenaltyLogitsProcessor .* --output-logits"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores=True .* --output-logits"),
        ({"return_dict_in_generate": True, "output_logits": True}, "output_logits=True .* --output-logits"),
        ({"do_sample": True, "typical_p": 0.5}, "TypicalLogitsWarper .* --output-logits"),
        ({"max_new_tokens": 60}, r"11 tokens and 60 new tokens do not fit sequence_length=64; lower max_new_tokens to 54"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_with_the_remedy(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.generate(torch.randint(3, 300, (1, 11)), **({"max_new_tokens": 4, "eos_token_id": None} | options))
    assert not model.runner.lengths.any()


def test_too_long_and_empty_prompts_are_refused_before_anything_runs(model: Any) -> None:
    calls, mask = model.runner.graph_calls.copy(), torch.tensor([[1, 1, 1], [0, 0, 0]])
    with pytest.raises(ValueError, match="a prompt of 65 tokens does not fit sequence_length=64"):
        model.generate(torch.randint(3, 300, (1, 65)), max_new_tokens=1)
    with pytest.raises(ValueError, match="row 1 of attention_mask masks every token"):
        model.generate(torch.ones_like(mask), attention_mask=mask, **GREEDY)
    assert model.runner.graph_calls == calls


def test_pipelines_take_strings_lists_and_chats(model: Any, tokenizer: Any) -> None:
    generator = pipeline("text-generation", model=model, tokenizer=copy.deepcopy(tokenizer))
    options = {"max_new_tokens": 5, "do_sample": False}
    assert generator("hello", **options)[0]["generated_text"].startswith("hello")
    assert len(generator(["a", "hello world"], batch_size=2, **options)) == 2
    chat = generator([{"role": "user", "content": "hi"}], **options)[0]["generated_text"]
    assert chat[-1]["role"] == "assistant"
    assert "NeuronModelForCausalLM" in repr(generator.model) or generator.model is model


def test_a_pipeline_cuts_a_long_prompt_to_what_the_artifact_holds(model: Any, artifact: Path) -> None:
    """The checkpoint takes 256 tokens, and names no length in its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(artifact)
    assert tokenizer.model_max_length == SIZES["sequence_length"]
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    text = "words " * 40
    options = {"max_new_tokens": 5, "do_sample": False, "return_tensors": True, "eos_token_id": None}
    (answer,) = generator(text, handle_long_generation="hole", **options)
    kept = tokenizer(text)["input_ids"][-(SIZES["sequence_length"] - 5) :]
    assert answer["generated_token_ids"][: len(kept)] == kept and len(answer["generated_token_ids"]) == 64
    assert len(tokenizer(text, truncation=True)["input_ids"]) == SIZES["sequence_length"]


def test_concurrent_calls_do_not_mix_their_slots(model: Any) -> None:
    prompts = [torch.randint(3, 300, (1, length)) for length in (3, 9, 17, 30)]
    alone = [model.generate(ids, **GREEDY) for ids in prompts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda ids: model.generate(ids, **GREEDY), prompts))
    assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))


def test_generation_config_objects_and_defaults_are_used(artifact: Path) -> None:
    model = NeuronModelForCausalLM.from_pretrained(artifact)
    model.generation_config = GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0)
    ids = torch.randint(3, 300, (1, 5))
    assert model.generate(ids).shape == (1, 8)
    assert model.generate(ids, generation_config=GenerationConfig(max_new_tokens=2, pad_token_id=0)).shape == (1, 7)


def test_a_saved_model_loads_again_with_its_generation_config(model: Any, tmp_path: Path) -> None:
    changed = copy.copy(model)
    changed.generation_config = GenerationConfig(max_new_tokens=2, temperature=0.5, pad_token_id=0)
    changed.save_pretrained(tmp_path / "saved")
    again = NeuronModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.generation_config.max_new_tokens == 2
    ids = torch.randint(3, 300, (1, 12))
    assert torch.equal(again.generate(ids, **GREEDY), model.generate(ids, **GREEDY))


def test_a_config_that_names_no_target_is_that_of_an_artifact_of_any() -> None:
    exported = SimpleNamespace(config=NeuronConfig(target="trn2"), target="trn2", path="artifact")
    refuse_other_options(exported, NeuronConfig(), NeuronConfig.option_names())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"context_buckets=\[1024\] differs from the \[256, 1024\]"):
        refuse_other_options(exported, NeuronConfig(context_buckets=(1024,)), NeuronConfig.option_names())  # type: ignore[arg-type]


def test_options_that_differ_from_the_artifact_are_refused(artifact: Path) -> None:
    for option, error, words in (
        ({"batch_size": 8}, ValueError, "batch_size=8 differs from the 4"),
        ({"batchsize": 8}, TypeError, "did you mean 'batch_size'"),
        ({"export": True}, ValueError, "is an artifact already"),
    ):
        with pytest.raises(error, match=words):
            NeuronModelForCausalLM.from_pretrained(artifact, **option)


def test_a_checkpoint_is_exported_unless_that_is_forbidden(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for name, options, words in (
        (tiny_checkpoint, {"export": False}, r"holds no neuron_config\.json"),
        (tmp_path / "nowhere.gguf", {}, "does not exist"), ("nobody/nothing", {}, "nobody/nothing"),
    ):  # fmt: skip
        with pytest.raises(FileNotFoundError, match=words):
            NeuronModelForCausalLM.from_pretrained(name, **options)
    folder = NeuronModelForCausalLM.from_pretrained(tiny_checkpoint, **SIZES).artifact.path
    assert not folder.exists(), "the temporary artifact goes with the model"
