# SPDX-License-Identifier: Apache-2.0
"""What neuron inspect tells of an artifact as data and as a page: true to its files, escaped, and one file that asks for no other."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import recurrent
from helpers import Artifacts, Cli, export_tiny
from tampering import write

from optimum_neuron.artifact.artifact import Artifact, ArtifactError
from optimum_neuron.hub.facts import (
    ArtifactFacts,
    Certified,
    Compared,
    GraphFacts,
    Linted,
    MemoryParts,
    Quantized,
    bytes_text,
    count_text,
)
from optimum_neuron.step.state_specs import byte_count
from optimum_neuron.tools.inspect.collect import collect_facts
from optimum_neuron.tools.inspect.html import render_page


SPEED = {"name": "decode", "value": 12.5, "unit": "ms", "conditions": {"rows": 1}}
HOSTILE = '</script></title></textarea>"\'><img src=x onerror="document.documentElement.dataset.owned=1"><script>document.documentElement.dataset.owned=1</script>{{7*7}}${7}'
STEP = "graphs/token_generation_context64.json"
VOID = ("meta", "link", "br", "img", "input", "hr")


class Page(HTMLParser):
    """The elements of a page; raises where one is not closed by its own tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="module")
def llama(cpu_artifact: Artifacts) -> ArtifactFacts:
    return collect_facts(Artifact.open(cpu_artifact("llama")))


def everything(facts: ArtifactFacts, text: str) -> ArtifactFacts:
    """With all parts that an artifact may have, and `text` in the place of all that its files decide."""
    graph = dataclasses.replace(facts.graphs[0], name=text, operators={text: 3, "dot": 1}, cost={
        "read": 2000, "read once": 1000, "written": 10, "flops": 1e6, "collectives": 2, "collective bytes": 64, "seconds at least": 1e-3,
    })  # fmt: skip
    return dataclasses.replace(
        facts,
        name=text, source=text, adapters=(text,), model_type=text, command=text, notes=(text,),
        graphs=(graph, GraphFacts("copy_slot", "helper", 0, 0, 0, 0, 5, None, {"add": 1}, graph.cost)),
        memory=(MemoryParts(text, {"weights": 3, "KV cache": 1, "scratch": 2}, ("scratch",), 10), MemoryParts("core 1", {"weights": 3}, (), 10)),
        weight_types={text: 4}, quantized=(Quantized("int8", 1, "float32", False, "int8", 2, text),),
        certificate=Certified(1, 2, 3, 4, ("opcode",), 5, (Compared(text, "float32", text, 6.25e-8, 1e-6, 9),)),
        lint=Linted(({"graph": text, "severity": "error", "problem": text, "remedy": text},)),
        exported_with={text: text}, compiled_with={text: text}, machine={text: text},
        speeds=(SPEED | {"name": text, "unit": text, "conditions": {text: text}},),
    )  # fmt: skip


def test_facts_are_those_of_the_files(cpu_artifact: Artifacts, llama: ArtifactFacts) -> None:
    artifact = Artifact.open(cpu_artifact("llama"))
    assert [each.name for each in llama.graphs] == [each.name for each in artifact.graphs]
    decode, prefill, mixed = llama.graphs
    assert (decode.shape, prefill.shape, mixed.shape) == ("3 x 1", "2 x 8", "3 x 1 + 2 x 8")
    assert (decode.tokens, mixed.tokens, prefill.padding, decode.padding) == (3, 19, 1 - 1 / 8, None)
    assert decode.operators["Attend"] == 2 and decode.operators["Sample"] == 1  # one for each layer, one for all
    files = {path.name: path.stat().st_size for path in (artifact.path / "graphs").iterdir()}
    assert sum(each.bytes for each in llama.graphs) == sum(files.values()) == llama.sizes["graphs"]
    (host,) = llama.memory
    assert host.parts["weights"] == (artifact.path / "weights" / "model.safetensors").stat().st_size
    assert host.parts["KV cache"] == byte_count(artifact.states()) == llama.sizes["cache and state"]
    plans = [json.loads((artifact.path / "graphs" / f"{each.name}.json").read_text())["plan"] for each in llama.graphs]
    assert host.parts["scratch"] == max(plan["arena"] for plan in plans)
    assert sum(llama.weight_types.values()) <= host.parts["weights"] and not llama.quantized
    assert llama.lint.missing and llama.certificate is None and not llama.speeds


def test_a_recurrent_and_a_quantized_artifact_tell_their_state_and_codes(tmp_path: Path) -> None:
    recurrent.model("gated delta").save_pretrained(tmp_path / "checkpoint")
    folder = export_tiny(tmp_path / "checkpoint", tmp_path / "out", quantization="int8", state_snapshots=2)
    facts = collect_facts(Artifact.open(folder))
    (host,) = facts.memory
    assert {"KV cache", "state of slots", "copies of state"} <= host.parts.keys() and "scratch" not in host.parts
    assert host.parts["KV cache"] + host.parts["state of slots"] == facts.sizes["cache and state"]
    assert host.parts["copies of state"] == facts.sizes["copies of state"] > 0
    assert {each.kind for each in facts.quantized} == {"int8"} and "int8" in facts.weight_types
    page = " ".join(Page(render_page(facts)).texts)
    assert "of state whatever its length" in page and "there are no compiled graphs" in page and "int8" in page


def test_a_page_is_one_file_that_asks_for_no_other(llama: ArtifactFacts) -> None:
    for facts in (llama, everything(llama, "plain")):
        text = render_page(facts)
        page = Page(text)
        assert not re.search(r"(?i)https?://|url\(|@import|<iframe|<object", text)
        links = {value for tag, name, value in page.attributes if name in ("src", "href", "srcset", "action")}
        assert all(value.startswith("#") or value == "data:," for value in links), links
        targets = {value[1:] for value in links if value.startswith("#")}
        ids = [value for _, name, value in page.attributes if name == "id"]
        assert targets <= set(ids) and len(ids) == len(set(ids))
        assert not [name for _, name, _ in page.attributes if name == "style" or name.startswith("on")]
        assert "script" not in page.tags
        policy = next(value for _, name, value in page.attributes if name == "content" and "default-src" in value)
        assert policy.startswith("default-src 'none';") and "unsafe" not in policy


def test_text_of_an_artifact_is_only_text_in_its_page(llama: ArtifactFacts) -> None:
    plain, hostile = Page(render_page(everything(llama, "plain"))), Page(render_page(everything(llama, HOSTILE)))
    assert hostile.tags == plain.tags and len(hostile.attributes) == len(plain.attributes)
    shown = [text for text in hostile.texts if HOSTILE in text]
    assert len(shown) == len([text for text in plain.texts if "plain" in text and "{" not in text])


def test_steps_stand_by_chunk_size_and_context_and_bars_are_filled_by_their_parts(llama: ArtifactFacts) -> None:
    graphs = [
        GraphFacts(f"{kind}_{chunk}_{context}", kind, 4, 1 if chunk else 0, chunk, context, 0, None)
        for context in (64, 128)
        for kind, chunk in (("token_generation", 0), ("chunked_prefill", 8), ("mixed", 8), ("scoring", 32))
    ]
    helper = GraphFacts("copy_slot", "helper", 0, 0, 0, 0, 0, None)
    page = Page(render_page(dataclasses.replace(llama, graphs=(*graphs, helper))))
    drawn = [text for text in page.texts if text.strip()]
    steps = drawn[drawn.index("context 64") : drawn.index("All graphs")]
    assert steps == [
        "context 64", "context 128",
        "no chunk", "decode, 4 tokens", "decode, 4 tokens",
        "chunk 8", "prefill, 12 tokens", "mixed, 12 tokens", "prefill, 12 tokens", "mixed, 12 tokens",
        "chunk 32", "scoring, 36 tokens", "scoring, 36 tokens",
    ]  # fmt: skip
    cores = tuple(MemoryParts(f"core {rank}", {"weights": 30, "KV cache": 10}, (), 80) for rank in range(20))
    page = Page(render_page(dataclasses.replace(llama, memory=cores)))
    bars = [(x, width) for (tag, name, x), (_, _, width) in itertools.pairwise(page.attributes) if (tag, name) == ("rect", "x")]  # fmt: skip
    assert bars[:2] == [("0.000", "37.500"), ("37.500", "12.500")]
    assert "20 cores alike, from core 0" in page.texts
    assert ", ".join(map(bytes_text, (0, 999, 1234, 65536, 5e15))) == "0 bytes, 999 bytes, 1.23 kB, 65.5 kB, 5,000 TB"
    assert count_text(1_500_000) == "1.50 M"


def test_page_and_data_are_written(
    cpu_artifact: Artifacts, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for room in ("hub", "tools.inspect"):
        monkeypatch.setattr(f"optimum_neuron.{room}.collect.read_speeds", lambda artifact: ((SPEED,), {}))
    page, data = tmp_path / "made" / "page.html", tmp_path / "data.json"
    page.parent.mkdir()
    page.write_text("before", encoding="utf-8")
    assert cli("neuron", "inspect", cpu_artifact("llama"), "--html", page, "--json", data)[1] == f"{page}\n{data}\n"
    assert {"decode", "12.5 ms", "rows 1"} <= set(Page(page.read_text(encoding="utf-8")).texts)
    document = json.loads(data.read_text(encoding="utf-8"))
    assert document["speeds"] == [SPEED] and document["graphs"][0]["operators"]["Attend"] == 2
    _, shown, _ = cli("neuron", "inspect", cpu_artifact("llama"))
    assert "rows 1" in shown and "12.5" in shown and "token_generation_context64" in shown
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]


def test_no_page_is_written_over_an_artifact_or_of_a_broken_one(
    cpu_artifact: Artifacts, tmp_path: Path, cli: Cli
) -> None:
    folder = Path(shutil.copytree(cpu_artifact("llama"), tmp_path / "artifact"))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    (tmp_path / "link").symlink_to(folder / "graphs")
    names = ("graphs/new.html", "config.json", "neuron_config.json", "weights/x", "../link/x.html", "graphs")
    for flag, name in itertools.product(("--html", "--json"), names):
        told = "is a folder" if name == "graphs" else "a file of the artifact itself"
        assert told in cli("neuron", "inspect", folder, flag, folder / name)[2]
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    graph = folder / STEP
    changed = {"is truncated": before[graph][:-2], "was changed after the export": before[graph][:-2] + b" }"}
    for told, data in changed.items():
        graph.write_bytes(data)
        assert told in cli("neuron", "inspect", folder, "--html", tmp_path / "page.html")[2]
        assert not (tmp_path / "page.html").exists()


def test_a_manifest_that_vouches_for_no_plan_is_refused(cpu_artifact: Artifacts, tmp_path: Path) -> None:
    folder, name = Path(shutil.copytree(cpu_artifact("llama"), tmp_path / "artifact")), STEP
    for data, told in ((b"[]", "cannot be read"), (b'{"plan": {"steps": 5}}', "holds no plan")):
        write(folder, name, data)
        with pytest.raises(ArtifactError, match=told):
            collect_facts(Artifact.open(folder))
    write(folder, name, b'{"plan": {"steps": [5, {"kind": 7}, {"kind": "<b>"}], "arena": "x"}}')
    assert collect_facts(Artifact.open(folder)).graphs[0].operators == {"unknown": 2, "<b>": 1}
