# SPDX-License-Identifier: Apache-2.0
"""Model cards: true, complete, and without a number that nobody measured; text of an artifact is never more than text in them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import shutil
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from helpers import export_tiny, tiny_config
from hub_server import put_in_hub_cache
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from optimum.commands import optimum_cli
from optimum.commands.register.export_neuron import NeuronExportCommand
from optimum.commands.register.neuron_options import read_declared

from optimum_neuron.artifact.artifact import Artifact, ArtifactError
from optimum_neuron.checkpoints.origin import card_facts
from optimum_neuron.config import NeuronConfig
from optimum_neuron.export.first_use import export_command
from optimum_neuron.hub.card import is_unchanged, make_card, write_card
from optimum_neuron.hub.collect import BENCH_NAME, speed_digest
from optimum_neuron.hub.facts import Quantized
from optimum_neuron.tools.inspect.collect import collect_facts


COMMIT = "0123456789abcdef0123456789abcdef01234567"
BASE_CARD = "---\nlicense: apache-2.0\nlanguage:\n- en\n- zh-Hans\ntags: [x]\n---\n# Base\n"
HOSTILE = (
    "x<script>alert(1)</script>", "</script><img src=x onerror=alert(1)>", "[a](javascript:alert(1))", "![](http://e.il/x.png)", "`code` ``x",
    "a | b\\|c", "---\nlicense: mit\n---", "# heading\n\n- list", "http://e.il www.e.il a@e.il", "<!-- made by", "${{7*7}} {{7*7}} {% x %}", "\u202eevil\x1b[31m",
)  # fmt: skip


@pytest.fixture(scope="module")
def artifact(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("card")
    base = put_in_hub_cache(tiny_checkpoint, "org/base", folder)
    (base / "README.md").write_text(BASE_CARD, encoding="utf-8")
    return export_tiny(base, folder / "tiny", quantization="int8")


@pytest.fixture
def own(artifact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(artifact, tmp_path / "tiny"))


class Page(HTMLParser):
    def __init__(self, card: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: set[str | None] = set()
        markdown = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
        self.feed(markdown.render(card.split("\n---\n", 1)[1]))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links |= {value for name, value in attrs if name in ("href", "src") or name.startswith("on")}


def test_a_card_tells_what_was_exported_and_is_valid_metadata(artifact: Path) -> None:
    opened = Artifact.open(artifact)
    card = make_card(collect_facts(opened), repo_id="me/tiny-neuron", tags=["mine"])
    assert ModelCard(card).data.to_dict() == {
        "library_name": "optimum-neuron-runtime", "pipeline_tag": "text-generation", "license": "apache-2.0",
        "language": ["en", "zh-Hans"], "base_model": "org/base", "base_model_relation": "quantized",
        "tags": ["neuron", "optimum", "text-generation", "eager", "float32", "int8", "mine"],
    }  # fmt: skip
    for words in (
        "# `tiny-neuron`", 'from_pretrained("me/tiny-neuron")', "hf download me/tiny-neuron --local-dir tiny-neuron", "| `mixed_chunk8_context64` |",
        f"--model org/base --revision {COMMIT}", "| int8 | ", "[org/base](https://huggingface.co/org/base)", "`transformers` `",
    ):  # fmt: skip
        assert words in card, words
    assert "Not measured." in card
    weights = sum(entry["size"] for name, entry in opened.manifest["files"].items() if name.startswith("weights/"))
    assert f"| weights | {weights / 1e3:,.0f} kB |" in card
    assert Page(card).links == {"https://huggingface.co/org/base"} and "script" not in Page(card).tags


def hostile_facts(artifact: Path, text: str) -> Any:
    plain = collect_facts(Artifact.open(artifact))
    return dataclasses.replace(
        plain, name=text, source=text, origin={}, adapters=(text,), model_type=text,
        exported_with={text: text}, compiled_with={text: text}, machine={text: text},
        command=export_command({"files": {}, "source": text, "adapters": [{"source": text}]}, Artifact.open(artifact).config, text),
        graphs=tuple(dataclasses.replace(each, name=text, operators={text: 1}) for each in plain.graphs),
        quantized=(Quantized("int8", 1, "float32", False, None, 1, text),),
        speeds=({"name": text, "value": 12.5, "unit": text, "conditions": {text: text}},),
    )  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_an_artifact_is_only_text_in_its_card(artifact: Path, text: str) -> None:
    card = make_card(hostile_facts(artifact, text), tags=[text])
    page, plain = Page(card), Page(make_card(hostile_facts(artifact, "plain")))
    assert page.links == set() and page.tags == plain.tags
    data, body = ModelCard(card).data.to_dict(), card.split("\n---\n", 1)[1]
    assert data["tags"][-1] == text and "license" not in data and data["library_name"] == "optimum-neuron-runtime"
    assert is_unchanged(card) and not {"\x1b", "\u202e"} & {*body}


def test_the_command_of_a_card_makes_the_same_artifact_and_names_no_folder_of_this_machine() -> None:
    """That its options make the same config is shown in tests/test_config.py."""
    config = tiny_config(quantization="int4", quantization_exclude=("*.o_proj", "a b$"), target="trn2")
    words = shlex.split(export_command({"files": {}, "source": "/home/me/it's mine/"}, config, "out/"))
    parser = ArgumentParser()
    NeuronExportCommand.parse_args(parser)
    args = parser.parse_args(words[3:])
    assert words[:3] == ["optimum-cli", "export", "neuron"]
    assert (args.model, args.output) == ("it's mine", Path("out/"))
    assert NeuronConfig.from_dict(read_declared(args, NeuronConfig)) == config
    manifest = {
        "files": {"modeling.py": {}}, "source": "/secret/place/model", "origin": {"dequantize": True},
        "adapters": [{"source": "org/lora"}, {"source": "/secret/lora"}, {"source": "--evil"}],
    }  # fmt: skip
    command = export_command(manifest, tiny_config(), "-x")
    assert "secret" not in command and command.endswith(" artifact/")
    adapters = "--adapter org/lora --adapter lora --adapter MODEL"
    assert all(words in command for words in ("--model model", adapters, "--dequantize", "--trust-remote-code"))


CARDS = {
    "license: mit": {"license": "mit"},
    "license: other\nlicense_name: my own\nlicense_link: https://x.org/l": {"license": "other", "license_name": "my own", "license_link": "https://x.org/l"},
    "license: 'mit\n\n  # heading'\nlanguage: en": {"language": ["en"]},
    "license: [mit]\nlanguage: ['<b>']": {},
    "license_link: javascript:alert(1)\nlicense: apache-2.0": {"license": "apache-2.0"},
    "license: !!python/object/apply:os.system ['x']": {},
    "- list": {}, "a: [": {}, "language: no": {},
}  # fmt: skip


@pytest.mark.parametrize("metadata", CARDS)
def test_only_what_is_of_the_hubs_form_is_taken_from_the_base_card(
    metadata: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "README.md"
    assert card_facts(path) == {}
    path.write_text("# x\n", encoding="utf-8")
    assert card_facts(path) == {} and not capsys.readouterr().err and not caplog.text
    path.write_bytes(b"\xff\xfe---")
    assert card_facts(path) == {}
    path.write_text(f"---\n{metadata}\n---\n# x\n", encoding="utf-8")
    assert card_facts(path) == CARDS[metadata]


def bench(artifact: Artifact, **changes: Any) -> dict[str, Any]:
    spread = {"median": 2.5, "min": 1.0, "max": 9.0}
    return {
        "format": 1, "digest": speed_digest(artifact), "machine": {"cpu": "EPYC", "threads": 2},
        "prefill": [{"prompt_tokens": 16, "ttft_ms": spread, "tokens_per_second": spread, "padding_share": 0.0}],
        "decode": [{"rows": 3, "context_tokens": 8, "step_ms": spread, "tokens_per_second": 1234.5, "idle_share": 0}],
    } | changes  # fmt: skip


def test_medians_of_a_bench_are_speeds_of_the_card(own: Path) -> None:
    opened = Artifact.open(own)
    (own / BENCH_NAME).write_text(json.dumps(bench(opened)), encoding="utf-8")
    card = write_card(opened).read_text(encoding="utf-8")
    for row in ("| `prefill` | `prompt` `16` | 2.5 | `tokens/s` |", "| `decode` | `rows` `3`, `context` `8` | 1,234 | `tokens/s` |",
                "| `first token` | `prompt` `16` | 2.5 | `ms` |", "| `decode step` | `rows` `3`, `context` `8` | 2.5 | `ms` |",
                "On `cpu` `EPYC`, `threads` `2`."):  # fmt: skip
        assert row in card, row
    assert is_unchanged(card) and "Not measured" not in card


def test_speeds_of_another_artifact_and_broken_ones_are_refused(own: Path, tiny_checkpoint: Path) -> None:
    opened, path = Artifact.open(own), own / BENCH_NAME
    for changes, told in (
        ({"prefill": [{"prompt_tokens": 1}]}, "it.prefill[0] lacks ttft_ms"),
        ({"digest": "0" * 64}, "was measured of another artifact"), ({"decode": "fast"}, "it.decode is"),
    ):  # fmt: skip
        path.write_text(json.dumps(bench(opened, **changes)), encoding="utf-8")
        with pytest.raises(ArtifactError, match=re.escape(told)):
            write_card(opened)
    path.write_text('{"digest": NaN', encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"bench\.json cannot be read: .*; remove it, or write it again"):
        write_card(opened)
    path.write_text(json.dumps(bench(opened)), encoding="utf-8")
    # An overwrite leaves what is not the artifact's.
    again = Artifact.open(export_tiny(tiny_checkpoint, own, overwrite=True, batch_size=4))
    with pytest.raises(ArtifactError, match="was measured of another artifact"):
        write_card(again)
    assert not (own / "README.md").exists()


def test_a_card_that_a_person_changed_is_replaced_only_when_asked(own: Path) -> None:
    opened = Artifact.open(own)
    card = write_card(opened)
    card.write_text(card.read_text(encoding="utf-8").replace("## Speed", "## My speed"), encoding="utf-8")
    before = card.read_bytes()
    with pytest.raises(FileExistsError, match=r"README\.md was written or changed by hand; pass --overwrite"):
        write_card(opened)
    assert card.read_bytes() == before
    assert is_unchanged(write_card(opened, overwrite=True).read_text(encoding="utf-8"))
    with pytest.raises(ValueError, match="base_model='no such name!' is no name of a Hub repository"):
        write_card(opened, base_model="no such name!")


def test_a_changed_graph_or_file_is_no_subject_of_a_card(cpu_artifact: Callable[[str], Path], tmp_path: Path) -> None:
    broken = Path(shutil.copytree(cpu_artifact("llama"), tmp_path / "broken"))
    graph = next((broken / "graphs").glob("*.json"))
    graph.write_bytes(graph.read_bytes()[:-1] + b" ")
    with pytest.raises(ArtifactError, match="was changed after the export"):
        write_card(Artifact.open(broken))
    assert not (broken / "README.md").exists()


def test_card_and_push_on_the_command_line(own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    def call(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["optimum-cli", "neuron", *words])
        optimum_cli.main()
        return capsys.readouterr().out

    assert call("card", str(own), "--tag", "mine", "--base-model", "org/other") == f"{own / 'README.md'}\n"
    data = ModelCard((own / "README.md").read_text(encoding="utf-8")).data.to_dict()
    assert data["base_model"] == "org/other" and "mine" in data["tags"]
    with pytest.raises(SystemExit):
        call("push", str(own), "org/tiny")
    assert "HF_HUB_OFFLINE is set, so the Hub is not asked" in capsys.readouterr().err
    assert os.stat(own / "README.md").st_mode & 0o077 == os.stat(own / "config.json").st_mode & 0o077
