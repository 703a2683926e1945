# SPDX-License-Identifier: Apache-2.0
"""python -m benchmark.quality: what it counts, of which text, and the whole of it on a tiny model."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from benchmark.quality import __main__ as quality
from benchmark.quality.figures import Counts
from benchmark.quality.text import MODULES, calibration_text, documentation, read_texts
from benchmark.quality.variants import variant_options
from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.artifact.measurements import MEASUREMENTS_NAME, quality_follows_from, read_measurements
from optimum_neuron.config import NeuronConfig
from optimum_neuron.export.recipe import export_model
from optimum_neuron.tools.hub.card import write_card


class Letters:
    """A tokenizer of one token a character."""

    def __call__(self, text: str, **_: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[ord(letter) % 300 for letter in text]])}


def test_figures_are_those_of_their_definitions() -> None:
    torch.manual_seed(0)
    ids, logits, reference = torch.tensor([1, 4, 0, 2]), torch.randn(4, 5), torch.randn(4, 5)
    counts = Counts()
    counts.add(ids[:2], logits[:2], reference[:2])
    counts.add(ids[1:], logits[1:], reference[1:])
    found = counts.figures()
    own, other = logits[:3].double().softmax(-1), reference[:3].double().softmax(-1)
    assert found.tokens == 3
    assert found.perplexity == pytest.approx(
        math.prod(float(own[place, ids[place + 1]]) for place in range(3)) ** (-1 / 3)
    )
    divergences = torch.nn.functional.kl_div(own.log(), other, reduction="none").sum(-1)
    assert (found.kl_mean, found.kl_max) == pytest.approx((float(divergences.mean()), float(divergences.max())))
    assert found.top1 == pytest.approx(float((own.argmax(-1) == other.argmax(-1)).double().mean()))


def test_a_model_beside_itself_differs_in_nothing() -> None:
    counts, logits = Counts(), torch.randn(200, 30)
    counts.add(torch.randint(0, 30, (200,)), logits, logits)
    found = counts.figures()
    assert (found.kl_mean, found.kl_max, found.top1, found.tokens) == (0, 0, 1, 199)
    assert found.perplexity == found.reference_perplexity


def test_what_no_figure_follows_from_is_refused() -> None:
    ids, logits = torch.tensor([1, 2]), torch.randn(2, 5)
    with pytest.raises(ValueError, match="are not finite"):
        Counts().add(ids, logits * torch.nan, logits)
    with pytest.raises(ValueError, match="are not of the same 2 tokens"):
        Counts().add(ids, logits[:1], logits)
    with pytest.raises(ValueError, match="there is no text of two tokens"):
        Counts().figures()


def test_texts_are_the_same_each_time_and_long() -> None:
    assert all(len(documentation(name)) > 3000 for name in MODULES)
    one, again = (read_texts(Letters(), 3, 500) for _ in range(2))
    assert one.digest == again.digest and [len(ids) for ids in one.ids] == [500] * 3
    assert all(torch.equal(left, right) for left, right in zip(one.ids, again.ids, strict=True))
    assert "object at 0x" not in "".join(map(documentation, MODULES))  # an address, which changes
    with pytest.raises(
        ValueError, match=r"0 of \d+ modules have documentation of 1000000 tokens, and 2 are asked for"
    ):
        read_texts(Letters(), 2, 1_000_000)


def test_text_to_round_on_is_none_that_is_measured() -> None:
    texts = read_texts(Letters(), 3, 500)
    other = calibration_text(texts)
    assert len(texts.modules) == 3 and not any(documentation(name) in other for name in texts.modules)
    assert documentation(MODULES[-1]) in other
    with pytest.raises(ValueError, match="all 27 modules are measured"):
        calibration_text(replace(texts, modules=MODULES))


def test_variants_may_be_refined() -> None:
    found = variant_options("float32+int4+groups-64+calibrated+kv-int8")
    assert found == {
        "dtype": "float32",
        "quantization": "int4",
        "quantization_group_size": 64,
        "kv_cache_dtype": "int8",
        "calibrated": True,
    }
    with pytest.raises(ValueError, match=r"'int8.calibrated' is rounded on a text, which is for int4"):
        variant_options("int8+calibrated")


@pytest.mark.parametrize(
    "name",
    [
        "float31",
        "auto",
        "float32+float16",
        "int8+int4",
        "kv-int8+kv-fp8",
        "int4+zero-point+zero-point",
        "int8-activations+int8-activations",
        "+",
        "no/folder",
    ],
)
def test_variants_that_name_nothing_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no artifact's folder and nothing that this version exports"):
        variant_options(name)


def test_it_measures_exports_and_artifacts(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the eager target, which takes no compiling: float32 is the reference but for rounding, bfloat16 is near it, int4 less so; and an
    artifact's card takes the figures of its own weights out of all of them, whatever its sizes are."""
    sizes = ["--target", "eager", "--texts", "2", "--length", "40", "--chunk-size", "16"]
    options = ["--model", str(tiny_checkpoint), *sizes]
    files = [f"--{name}={tmp_path / place}" for name, place in (("artifacts", ""), ("json", "found.json"))]
    names = ["float32", "bfloat16", "bfloat16+int4", "bfloat16+int4+calibrated", "bfloat16+kv-int8"]
    assert quality.main([*options, *files, "--variants", *names]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found == json.loads((tmp_path / "found.json").read_text())
    full, half, quarter, calibrated, codes = found["variants"]
    assert quarter["weight_bytes"] == calibrated["weight_bytes"] and codes["weights_sha256"] == half["weights_sha256"]
    assert len({each["kl_mean"] for each in found["variants"]}) == 5
    text = tmp_path / "text.txt"
    text.write_text(
        calibration_text(read_texts(AutoTokenizer.from_pretrained(tiny_checkpoint), 2, 40)), encoding="utf-8"
    )
    for own, expected in ((text, calibrated), (None, quarter)):
        config = NeuronConfig(target="eager", sequence_length=64, dtype="bfloat16", quantization="int4")
        path = export_model(
            tiny_checkpoint, tmp_path / "own", config=config, quantization_calibration=own, overwrite=True
        )
        write_card(Artifact.open(path), quality=tmp_path / "found.json", overwrite=True)
        recorded = read_measurements(Artifact.open(path))
        assert recorded is not None and recorded.quality == [expected]
        (path / MEASUREMENTS_NAME).unlink()
    assert (full["name"], half["dtype"], found["tokens"], full["tokens"]) == ("float32", "bfloat16", 80, 78)
    assert full["kl_max"] < 1e-6 and full["top1"] == 1 and full["text_sha256"] == half["text_sha256"]
    assert full["kl_max"] < half["kl_mean"] < quarter["kl_mean"] < 1e-2
    assert quarter["weight_bytes"] < half["weight_bytes"] < full["weight_bytes"]
    folder = next(
        path
        for path in tmp_path.glob("*-bfloat16-*")
        if quality_follows_from(Artifact.open(path))
        == {name: half[name] for name in quality_follows_from(Artifact.open(path))}
    )
    assert quality.main([*options, *files, "--variants", str(folder)]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])["variants"][0]
    assert {**again, "name": "bfloat16"} == half
