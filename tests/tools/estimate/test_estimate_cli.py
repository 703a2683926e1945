# SPDX-License-Identifier: Apache-2.0
"""optimum-cli neuron estimate: where configs come from, what is shown and written, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers import Cli, export_tiny
from torch._subclasses.fake_tensor import FakeTensor
from transformers import LlamaConfig, MambaConfig, PreTrainedConfig, Qwen3NextConfig

from optimum_neuron.checkpoints import find
from optimum_neuron.config import NeuronConfig
from optimum_neuron.targets.neuron.sdk.hardware import GIB, INSTANCES
from optimum_neuron.tools.estimate.estimate import estimate_model
from optimum_neuron.tools.estimate.report import model_line, to_json, write_sentences


@pytest.fixture(scope="module")
def llama_1b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config and nothing else."""
    folder = tmp_path_factory.mktemp("llama_1b")
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_key_value_heads": 8}
    LlamaConfig(**sizes, vocab_size=128256, max_position_embeddings=131072, dtype="bfloat16").save_pretrained(folder)
    return folder


def test_tables_say_what_json_says(llama_1b: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    document = tmp_path / "other/estimate.json"
    sizes = "--batch-size 4 --sequence-length 4096 --prefill-chunk-buckets 16,32 --context-length 9"
    words = ["-m", llama_1b, *sizes.split(), "--target", "trn2", "inf2", "--json", document]
    _, shown, _ = cli("neuron", "estimate", *words)
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80
    found = json.loads(document.read_text())
    rows = [row.split() for row in shown.splitlines() if re.match(r"(trn2|inf2) +\d", row)]
    count = len(found["estimates"])
    assert len(rows) == 2 * count
    for one, memory, speed in zip(found["estimates"], rows[:count], rows[count:], strict=True):
        config, parts = one["config"], one["memory"]
        named = [config["target"], str(config["tensor_parallel_size"])]
        assert memory[:2] == [speed[0], speed[1].rstrip("?")] == named
        assert speed[1].endswith("?") == (config["tensor_parallel_size"] < 4)
        assert (memory[6], memory[8]) == (f"{parts['total'] / GIB:.2f}", "yes")
        assert parts["total"] == sum(parts[name] for name in ("weights", "kv_cache", "activations", "reserve"))
        assert memory[9:11] == [f"{one['largest_batch']:,}", f"{one['longest_sequence']:,}"]
        decode, cells = one["decode"], " ".join(speed[2:]).replace(" k", "k").split()
        spans = [value for cell in cells[:3] for value in read_span(cell)]
        expected = [1e3 * decode["low_s"], 1e3 * decode["high_s"], decode["low_tok_s"], decode["high_tok_s"]]
        assert spans == pytest.approx([*expected, *[decode["peak_tok_s"]] * 2], rel=0.05)
        assert cells[-1] in {name.partition(".")[2] for name in one["hosts"]}
        assert (config["batch_size"], config["prefill_chunk_buckets"]) == (4, [16, 32])
    assert (found["context_length"], found["dtype"]) == (9, "bfloat16")
    text = " ".join(shown.split())
    assert text.startswith(found["notes"][0]) and all(sentence in text for sentence in found["notes"])
    assert "published runs of other models" in text


def read_span(text: str) -> tuple[float, float]:
    """Both ends of what a table shows."""
    scale = 1e3 if text.endswith("k") else 1.0
    low, _, high = text.rstrip("k").replace(",", "").partition("-")
    return float(low) * scale, float(high or low) * scale


def test_a_terminal_of_80_columns_shows_first_what_to_rent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """With the longest numbers and names: a large model, many rows, long sequences, every size of every target."""
    monkeypatch.setenv("COLUMNS", "80")
    LlamaConfig(
        hidden_size=8192, intermediate_size=28_672, num_hidden_layers=2, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128_256, max_position_embeddings=1 << 20, dtype="bfloat16",
    ).save_pretrained(tmp_path)  # fmt: skip
    huge = ("--batch-size", "100000", "--sequence-length", "1048576", "--target", "trn2", "trn3")
    for sizes_asked in (huge, ("--batch-size", "64", "--sequence-length", "16384")):
        lines = cli("neuron", "estimate", "--model", tmp_path, *sizes_asked)[1].splitlines()
        assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    head = " ".join("".join(f"{line.rstrip()} " for line in lines[:6]).split())
    told = r"Rent 1 (\S+), as no host with less device memory \(\d+ GiB\) holds the model: .*"
    assert re.match(told + r"--target \w+ --tensor-parallel-size \d+\), [\d,. k-]+ tokens/s decoded\.", head), head
    assert sum(line.startswith(("inf2 ", "trn1 ", "trn2 ", "trn3 ")) for line in lines) > 30


def test_what_is_rented_is_the_least_that_holds_the_model(llama_1b: Path) -> None:
    few, many = (
        estimate_model(str(llama_1b), {"batch_size": rows, "sequence_length": 8192}, ["trn2", "inf2", "trn3"])
        for rows in (1, 256)
    )
    for report in (few, many):
        fitting = [one for one in report.estimates if one.fits]
        least = min(host.hbm for one in fitting for host in one.hosts)
        named = re.findall(r"1 ([\w.]+xlarge)", write_sentences(report)[0])
        (host,) = (host for host in INSTANCES if host.name == named[0])
        assert host.hbm == least
        way = re.search(r"(\d+) cop\w+ on (\d+) cores?.*?--target (\w+) --\S+ (\d+)", write_sentences(report)[0])
        assert way is not None
        copies, cores, target, size = way.groups()
        assert (target, cores, int(copies)) == (host.target, size, host.cores // int(size))
        assert any((one.config.target, one.config.tensor_parallel_size) == (target, int(size)) for one in fitting)
    assert write_sentences(few)[0].startswith("Rent 1 inf2.xlarge, as no host with less device memory (32 GiB)")
    assert "Rent 1 inf2.xlarge" not in write_sentences(many)[0]


def test_nothing_fits_says_what_would(tmp_path: Path) -> None:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8}
    LlamaConfig(**sizes, max_position_embeddings=131072, dtype="bfloat16").save_pretrained(tmp_path)
    options = {"batch_size": 64, "sequence_length": 16_384}
    report = estimate_model(str(tmp_path), options, ["trn1"], tensor_parallel_size=2)
    (one,) = report.estimates
    assert not one.fits and 1 <= one.largest_batch < 64
    assert "Nothing to rent: the nearest, trn1 with tensor_parallel_size=2" in write_sentences(report)[0]
    remedy = f"try --batch-size {one.largest_batch} or --sequence-length {one.longest_sequence}."
    assert remedy in write_sentences(report)[0]
    for batch_size, fits in ((one.largest_batch, True), (one.largest_batch + 1, False)):
        sizes = options | {"batch_size": batch_size, "prefill_chunk_size": 512}
        (smaller,) = estimate_model(str(tmp_path), sizes, ["trn1"], tensor_parallel_size=2).estimates
        assert smaller.fits == fits


def test_a_gguf_file_gives_its_config_and_no_weight_is_read(smollm2_gguf: Path) -> None:
    report = estimate_model(str(smollm2_gguf), {"batch_size": 2}, ["inf2"], tensor_parallel_size=1)
    assert report.sizes.parameters == 134_515_008
    head, frequencies = 49_152 * 576, 2 * 32  # the tied head in its own form, and two tables of rotary frequencies
    assert report.estimates[0].memory.weights == 4 * (134_515_008 + head + frequencies)
    assert "float32 is assumed" in report.notes[0]
    assert all(isinstance(parameter, FakeTensor) for parameter in report.sizes.model.parameters())


def test_the_hub_gives_the_config_alone(tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(repo_id: str, patterns: list[str], **options: Any) -> Path:
        asked.update(options, patterns=patterns, repo_id=repo_id)
        return tiny_checkpoints["llama"]

    monkeypatch.setattr(find, "download", download)
    options = {"sequence_length": 64}
    report = estimate_model("org/name", options, ["trn2"], tensor_parallel_size=1, revision="v1", token="t")
    patterns = ["config.json", "adapter_config.json", "model.safetensors.index.json"]
    assert asked == {"repo_id": "org/name", "patterns": patterns, "revision": "v1", "token": "t"}
    assert report.model == "org/name"


def test_sizes_given_replace_those_of_an_artifact(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = export_tiny(tiny_checkpoints["llama"], tmp_path / "artifact")
    (one,) = estimate_model(str(path), {"sequence_length": 256}, ["inf2"], tensor_parallel_size=1).estimates
    assert (one.config.batch_size, one.config.dtype, one.config.output_logits) == (3, "float32", True)
    assert (one.config.sequence_length, one.config.prefill_chunk_size, one.config.ctx_batch_size) == (256, 128, 1)


MAMBA = MambaConfig(num_hidden_layers=3, hidden_size=64, state_size=16, vocab_size=300)
DENSE = {"num_experts": 0, "decoder_sparse_step": 1, "mlp_only_layers": [0, 1, 2, 3]}
HYBRID = Qwen3NextConfig(num_hidden_layers=4, hidden_size=64, vocab_size=300, **DENSE)
# By layer, in float32 a state and an anchor of 16 rows for 128 channels, and a tail of 64 tokens: keys, values and steps; and three
# inputs of 128 channels in bfloat16. A number for all of them tells how far chunks came.
MAMBA_SLOT = 3 * (4 * (2 * 16 * 128 + 64 * (16 + 128 + 128)) + 2 * 3 * 128) + 4
# Three layers of 32 heads of 128 x 128, with keys of 16 heads; one of attention with 2 heads of 256.
HYBRID_SLOT = 3 * (4 * (2 * 32 * 128 * 128 + 64 * (2 * 32 * 128 + 2 * 32)) + 2 * 3 * (2 * 16 + 32) * 128) + 4


@pytest.mark.parametrize(
    ("config", "per_token", "per_slot"), [(MAMBA, 0, MAMBA_SLOT), (HYBRID, 2 * 2 * 2 * 256, HYBRID_SLOT)]
)
def test_states_are_told_by_slot(config: PreTrainedConfig, per_token: int, per_slot: int, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    sizes = {"batch_size": 4, "sequence_length": 1024, "dtype": "bfloat16", "state_snapshots": 6}
    report = estimate_model(str(tmp_path), sizes, ["trn2"])
    found = to_json(report)
    shown = " ".join([model_line(report), *found["notes"]])
    assert (found["cache_bytes_per_token"], found["state_bytes_per_slot"]) == (per_token, per_slot)
    one = found["estimates"][0]
    assert one["config"]["tensor_parallel_size"] == 1
    assert one["memory"]["kv_cache"] == 5 * (1024 * per_token + per_slot) + 6 * per_slot
    assert "KV also holds 6 copies of that, of which prefixes are continued." in shown
    assert f"{config.num_hidden_layers} layers" in shown and "KV holds what layers keep by slot" in shown
    refused = f"{config.model_type} cannot be shared by tensor_parallel_size=2 ranks: the heads of "
    # The hybrid's 32 heads are shared by as many cores, or fewer.
    for text, is_hybrid in (
        ("tokens of keys and values do", True), (refused, False), ("On 64 cores layers with recurrences are whole", True),
    ):  # fmt: skip
        assert (text in shown) == (bool(per_token) == is_hybrid)


def test_help_has_every_option_that_matters(cli: Cli) -> None:
    _, shown, _ = cli("neuron", "estimate", "--help")
    # No matter of an estimate: what partial sums are added in, as it counts collectives, values of weights, graphs that run where
    # somebody asks, when copies of states are taken, and what the host CPU alone does.
    others = "float32_reduce long_frequencies top_logprobs kernels state_snapshot_interval activations"
    for name in set(NeuronConfig.option_names()) - set(others.split()):
        assert re.search(rf"--(no-)?{name.replace('_', '-')}\b", shown), name
    assert "examples:\n  optimum-cli neuron estimate --model" in shown and not re.findall(r"--\w+_\w+", shown)
