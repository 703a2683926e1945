# SPDX-License-Identifier: Apache-2.0
"""forward returns what transformers' models return: logits of any of a prompt's tokens, and the loss of labels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import as_tensor, export_tiny, random_tokens
from transformers import AutoModelForCausalLM, BartConfig, BartForCausalLM

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.core import PromptPiece
from optimum_neuron.runtime.prefill import find_scoring_graph


# Logits differ from transformers' by other orders of summation in float32.
NOISE = 2e-5
WIDTH, LENGTHS = 29, (29, 22, 20)
Models = Callable[..., tuple[Any, Any]]
EVERY_FORM = ("llama", "gemma2", "gpt_oss", "lfm2")


@pytest.fixture(scope="module")
def models(sharp_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A model of an artifact that scores, and transformers' own, by architecture and target."""
    made: dict[tuple[str, str], tuple[Any, Any]] = {}

    def load(name: str = "llama", target: str = "eager") -> tuple[Any, Any]:
        if (name, target) not in made:
            checkpoint, folder = sharp_checkpoints[name], tmp_path_factory.mktemp("scores") / "artifact"
            path = export_tiny(checkpoint, folder, target=target, prompt_logits=True)
            theirs = {"dtype": torch.float32, "attn_implementation": "eager"}
            reference = AutoModelForCausalLM.from_pretrained(checkpoint, **theirs)
            made[name, target] = NeuronModelForCausalLM.from_pretrained(path), reference.requires_grad_(False)
        return made[name, target]

    return load


def batch(side: str) -> dict[str, torch.Tensor]:
    """Three prompts, two of them padded: longer than a chunk and of other lengths than whole chunks."""
    ids = torch.from_numpy(random_tokens(len(LENGTHS) * WIDTH)).long().view(len(LENGTHS), WIDTH)
    columns, lengths = torch.arange(WIDTH), torch.tensor(LENGTHS)[:, None]
    mask = columns >= WIDTH - lengths if side == "left" else columns < lengths
    return {"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long()}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("name", "target"), [*((name, "eager") for name in EVERY_FORM), ("llama", "cpu")])
def test_logits_of_all_tokens_are_those_of_transformers(models: Models, name: str, target: str, side: str) -> None:
    model, reference = models(name, target)
    given = batch(side)
    logits = model(**given).logits
    assert logits.shape == (3, WIDTH, reference.config.vocab_size) and logits.dtype == torch.float32
    for found, ids, mask in zip(logits, given["input_ids"], given["attention_mask"].bool(), strict=True):
        expected = reference(ids[mask][None]).logits[0]
        torch.testing.assert_close(found[mask], expected, atol=NOISE, rtol=0)
        assert not found[~mask].any()


@pytest.mark.parametrize("target", ["eager", "cpu"])
def test_neighbours_and_where_a_prompt_is_cut_change_no_bit(models: Models, target: str) -> None:
    model, _ = models(target=target)
    given = batch("left")
    together = model(**given).logits
    for row, mask in enumerate(given["attention_mask"].bool()):
        alone = model(given["input_ids"][row][mask][None]).logits
        assert torch.equal(alone[0], together[row][mask])
    prompt, runner = random_tokens(WIDTH), model.runner
    whole = model(torch.from_numpy(prompt).long()[None]).logits[0]
    for cuts in ((8, 8, 8, 5), (3, 16, 1, 9), (13, 16)):
        start, parts = 0, []
        for count in cuts:
            chunks = [PromptPiece(1, prompt[start : start + count])]
            output = runner.run_step(chunks, graph=find_scoring_graph(runner, chunks))
            (logits,) = output.of_prompts(chunks)
            assert np.array_equal(logits[-1], output.chunk_logits[0])
            parts.append(as_tensor(logits))
            start += count
        runner.reset_slots()
        assert torch.equal(torch.cat(parts), whole)


def test_kept_columns_are_those_of_all(models: Models) -> None:
    model, _ = models()
    for side in ("left", "right"):
        given = batch(side)
        every = model(**given).logits
        for kept in (2, WIDTH, 100):
            assert torch.equal(model(**given, logits_to_keep=kept).logits, every[:, -kept:])
        for columns in (torch.tensor([-1, 3, 3, 20]), torch.tensor([5], dtype=torch.int32)):
            assert torch.equal(model(**given, logits_to_keep=columns).logits, every[:, columns])
        # As of artifacts that return no others: of the last token that is one.
        ends = [(row, int(mask.nonzero()[-1])) for row, mask in enumerate(given["attention_mask"])]
        last = torch.stack([every[end] for end in ends])[:, None]
        torch.testing.assert_close(model(**given, logits_to_keep=1).logits, last, atol=NOISE, rtol=0)


def test_only_who_asks_for_all_logits_runs_a_graph_that_scores(models: Models) -> None:
    model, _ = models()
    model.runner.graph_calls.clear()
    model(batch("left")["input_ids"], logits_to_keep=1)
    model.generate(batch("left")["input_ids"], max_new_tokens=3, do_sample=False, eos_token_id=None)
    model.generate_batch([[5, 6, 7]], max_new_tokens=3)
    assert not [name for name in model.runner.graph_calls if name.startswith("scoring")]
    model.runner.graph_calls.clear()
    model(batch("left")["input_ids"])
    assert set(model.runner.graph_calls) == {"scoring_chunk8_context64"}


def test_packed_prompts_lie_as_they_were_given(models: Models) -> None:
    model, _ = models()
    prompts = [torch.from_numpy(random_tokens(length)).long()[None] for length in (5, 17, 2)]
    last = model(torch.cat(prompts, dim=1), cu_seq_lens_q=torch.tensor([0, 5, 22, 24]), logits_to_keep=1).logits
    for row, prompt in zip(last, prompts, strict=True):
        assert torch.equal(row, model(prompt, logits_to_keep=1).logits[0])
    packed = model(torch.cat(prompts, dim=1), cu_seq_lens_q=torch.tensor([0, 5, 22, 24])).logits
    assert torch.equal(packed, torch.cat([model(prompt).logits for prompt in prompts], dim=1))
    with pytest.raises(ValueError, match="attention_mask has no meaning for packed prompts"):
        model(prompts[0], attention_mask=torch.ones(1, 5), cu_seq_lens_q=torch.tensor([0, 5]))


def test_the_loss_of_labels_is_that_of_transformers(models: Models) -> None:
    model, reference = models()
    ids = batch("left")["input_ids"]
    output = model(ids, labels=ids)
    torch.testing.assert_close(output.loss, reference(ids, labels=ids).loss)
    assert torch.equal(output.logits, model(ids).logits)
    for side in ("left", "right"):
        given = batch(side)
        mask = given["attention_mask"].bool()
        labels = given["input_ids"].masked_fill(~(mask & mask.roll(1, -1)), -100)
        torch.testing.assert_close(model(**given, labels=labels).loss, reference(**given, labels=labels).loss)
    assert model(ids, labels=torch.full_like(ids, -100)).loss.isnan()  # of nothing, as there


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": torch.zeros(3, 4, dtype=torch.long)}, r"labels are torch.int64 \[3, 4\]; give torch.int64 \[3, 29\]"),
        ({"labels": torch.zeros(3, WIDTH)}, "labels are torch.float32"), ({"labels": [[1]]}, "labels are list"),
        ({"labels": torch.full((3, WIDTH), 300)}, "labels hold 300, and the model has tokens 0 to 299"),
        ({"labels": torch.full((3, WIDTH), -1)}, "labels hold -1"),
        ({"labels": torch.zeros(3, WIDTH, dtype=torch.long)}, "labels count a token after padding"),
        ({"labels": torch.full((3, WIDTH), -100), "logits_to_keep": 1}, "labels need the logits of all tokens"),
        ({"logits_to_keep": -1}, "logits_to_keep=-1 must be 0"),
        ({"logits_to_keep": torch.tensor([WIDTH])}, "names columns that the 29 of input_ids have not"),
        ({"logits_to_keep": torch.tensor([[1]])}, "names columns"),
        ({"logits_to_keep": torch.tensor([0.5])}, "names columns"),
    ],
)  # fmt: skip
def test_labels_and_columns_that_do_not_fit_are_refused(models: Models, change: dict[str, Any], words: str) -> None:
    model, _ = models()
    calls = sum(model.runner.graph_calls.values())
    with pytest.raises(ValueError, match=words):
        model(**batch("left"), **change)
    assert sum(model.runner.graph_calls.values()) == calls


def test_columns_that_are_no_number_are_refused(models: Models) -> None:
    for kept in (True, "2", 1.0):
        with pytest.raises(TypeError, match=f"logits_to_keep is {kept!r}; give a whole number"):
            models()[0](**batch("left"), logits_to_keep=kept)


def test_a_loss_of_another_kind_is_refused(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BART's decoder shifts no labels; a router's balance is no matter of logits."""
    sizes = {"decoder_attention_heads": 2, "decoder_ffn_dim": 48, "encoder_layers": 1, "decoder_layers": 1}
    config = BartConfig(vocab_size=300, d_model=32, max_position_embeddings=128, **sizes)
    BartForCausalLM(config).save_pretrained(tmp_path / "checkpoint")
    path = export_tiny(tmp_path / "checkpoint", tmp_path / "artifact", prompt_logits=True)
    ids = batch("left")["input_ids"]
    with pytest.raises(ValueError, match="the loss of BartForCausalLM is not of logits and labels alone"):
        NeuronModelForCausalLM.from_pretrained(path)(ids, labels=ids)
    model, _ = models()
    monkeypatch.setattr(model.config, "output_router_logits", True, raising=False)
    with pytest.raises(ValueError, match="the loss of LlamaForCausalLM is not of logits and labels alone"):
        model(ids, labels=ids)


def test_artifacts_that_return_the_last_logits_only_say_how_to_get_all(
    sharp_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    path = export_tiny(sharp_checkpoints["llama"], tmp_path / "artifact")
    model, ids = NeuronModelForCausalLM.from_pretrained(path), batch("left")["input_ids"]
    assert model(ids, logits_to_keep=1).logits.shape == (3, 1, 300)
    remedy = r"no graph of this artifact returns them; export it with --prompt-logits \(prompt_logits=True\)"
    changes: list[dict[str, Any]] = [{}, {"logits_to_keep": 3}, {"labels": ids}]
    for change, words in zip(changes, ("keep=0 asks for", "keep=3 asks for", "labels need"), strict=True):
        with pytest.raises(ValueError, match=f"{words} logits of more than each prompt's last token, and {remedy}"):
            model(ids, **change)


@pytest.mark.parametrize("options", [{"deterministic": True}, {"prefill_chunk_buckets": (4,)}, {"kv_block_size": 64}])
def test_all_graphs_and_caches_score_alike(
    models: Models, options: dict[str, Any], sharp_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    sizes = {name: value for name, value in options.items() if name != "deterministic"}
    path = export_tiny(sharp_checkpoints["llama"], tmp_path / "artifact", prompt_logits=True, **sizes)
    model = NeuronModelForCausalLM.from_pretrained(path, deterministic=len(sizes) == 0)
    for given in (batch("right"), {"input_ids": torch.tensor([[5, 6, 7]])}):
        logits = model(**given).logits
        torch.testing.assert_close(logits, models()[0](**given).logits, atol=NOISE, rtol=0)
    assert all(name.startswith("scoring") for name in model.runner.graph_calls)
