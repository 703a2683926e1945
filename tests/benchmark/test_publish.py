# SPDX-License-Identifier: Apache-2.0
"""What readers see of measurements is what one run wrote: every row, what is lost, and no number by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from documents import README, ROOT, by_hand

from benchmark import publish
from benchmark.output import Table, command_line
from benchmark.peers import report as peers
from benchmark.peers.names import OURS, PEERS
from benchmark.peers.results import FIRST_TOKEN
from benchmark.section import Compared, verdict


RESULTS = ROOT / "docs" / "results.md"
FILES = sorted(publish.PUBLISHED.glob("*.json"))
PREFILL, SERVE = "prefill 128, tok/s", "2 requests, new tok/s"


def values(**medians: float) -> dict[str, Any]:
    return {name: {"median": median, "share": None} for name, median in medians.items()}


def report(**figures: dict[str, Any]) -> dict[str, Any]:
    """A run with four peers: OpenVINO wins one row, the static cache another."""
    found = {
        PREFILL: values(optimum_neuron=100, transformers=50, openvino=116),
        FIRST_TOKEN: values(optimum_neuron=4.0, **{"transformers-static": 1.0}, llamacpp=3.95),
        SERVE: values(optimum_neuron=70, llamacpp=30),
    }
    group = {"model": "m", "precision": "int8", "figures": found | figures, "agreement": {OURS: 0.5}, "reasons": {}}
    names = ["optimum_neuron-plain", "transformers", "transformers-static", "llamacpp", "openvino"]
    machine = {"cpu": "a CPU", "threads": 2, "kernels": "avx2", "commit": "abc1234"}
    return {
        "benchmark": "peers", "command": "python -m benchmark.peers", "date": "2026-11-08", "machine": machine,
        "options": {"peers": names, "rounds": 3}, "missing": {}, "notes": [], "groups": [group],
    }  # fmt: skip


@pytest.fixture
def _made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Documents with nothing but markers, and one run."""
    for name, markers in (("README", ("speed", "peers")), ("RESULTS", ("all",))):
        path = tmp_path / f"{name}.md"
        path.write_text("\n\n".join(f"<!-- results {each} -->\n\n<!-- end -->" for each in markers), encoding="utf-8")
        monkeypatch.setattr(publish, name, path)
    (tmp_path / "peers.json").write_text(json.dumps(report()), encoding="utf-8")
    yield


def test_documents_are_what_the_published_runs_give() -> None:
    for path, text in publish.documents(publish.PUBLISHED):
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is of other runs; run make results"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_published_run_names_its_machine_commit_and_command(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert re.fullmatch(r"python -m benchmark\.[\w.]+( [^/]+)*", found["command"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    if "machine" in found:  # what is simulated or fitted runs nowhere
        assert {"cpu", "threads", "kernels", "torch"} <= found["machine"].keys()
        assert re.fullmatch(r"[0-9a-f]{7,12}", found["machine"]["commit"]), "measure a commit, not a changed tree"


@pytest.mark.parametrize(
    "page", [README, RESULTS, ROOT / "benchmark" / "README.md"], ids=lambda path: str(path.relative_to(ROOT))
)
def test_no_number_of_a_table_is_written_by_hand(page: Path) -> None:
    rows = re.findall(r"^\|.*$", by_hand(page), re.MULTILINE)
    assert not [row for row in rows if any(re.match(r"[\d.,]+\b", cell.strip()) for cell in row.split("|"))]


@pytest.mark.usefixtures("_made_up")
def test_every_row_and_every_runtime_of_a_run_is_published(tmp_path: Path) -> None:
    texts = {path.name: text for path, text in publish.documents(tmp_path)}
    for row in (PREFILL, FIRST_TOKEN, SERVE, peers.AGREEMENT):
        assert re.search(rf"^\| (\*\*int8\*\* )?{re.escape(row)} \|", texts["README.md"], re.MULTILINE)
        assert f"\n| {row} |" in texts["RESULTS.md"]
    heads = texts["README.md"].partition("\n| |")[2].partition("\n")[0]
    for peer in ("transformers", "llamacpp", "openvino", "transformers-static"):  # the static cache, as it wins a row
        assert f" {PEERS[peer].label} |" in heads
    assert "of 3 rows 1 won, 0 level, 2 lost: prefill, start" in texts["README.md"]
    for text in texts["README.md"], texts["RESULTS.md"]:
        assert "prefill 128 (OpenVINO by 16%)" in text and f"{PEERS['transformers-static'].label} 4.0 times" in text
        assert "commit abc1234 (8 November 2026)" in text and "2 threads of a CPU" in text
    # A changed number and a missing row give other documents, and a second run of one benchmark another heading.
    first = dict(publish.documents(tmp_path))
    changed, fewer = report(**{SERVE: values(optimum_neuron=71, llamacpp=30)}), report()
    del fewer["groups"][0]["figures"][SERVE]
    for other in (changed, fewer):
        (tmp_path / "peers.json").write_text(json.dumps(other), encoding="utf-8")
        second = dict(publish.documents(tmp_path))
        assert all(first[path] != second[path] for path in first)
    (tmp_path / "peers_avx2.json").write_text(json.dumps(report()), encoding="utf-8")
    text = dict(publish.documents(tmp_path))[tmp_path / "RESULTS.md"]
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Other runtimes", "Other runtimes: peers_avx2"]


@pytest.mark.usefixtures("_made_up")
def test_a_run_of_no_known_benchmark_and_a_page_without_markers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "RESULTS.md").write_text("# Results\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"RESULTS\.md has no <!-- results all --> with an <!-- end -->"):
        dict(publish.documents(tmp_path))
    (tmp_path / "x.json").write_text('{"benchmark": "guess"}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"x\.json is of benchmark 'guess', which has no section; known are peers"):
        publish.reports(tmp_path)


def test_lost_and_level_rows_are_named_with_by_how_much_and_to_whom() -> None:
    rows = [
        Compared("int8", "more, tok/s", 100, {"a": 116, "b": 104, "c": 90}, more=True),
        Compared("int8", "less, ms", 10, {"a": 4, "b": 10.1, "c": 0}, more=False),
        Compared("int8", "near, ms", 10, {"a": 9.8, "b": 10.2, "c": 20}, more=False),
        Compared("int8", "won, ms", 10, {"a": 11}, more=False),
        Compared("int8", "alone, ms", 10, {}, more=False),
    ]
    assert list(verdict(rows)) == [
        "**Lost**, int8: more (a by 16%, b by 4%); less (c takes nothing, a 2.5 times).",
        "**Level**, int8, within 3%: near (a, b).",
        "Won, int8: 1 of 4 rows.",
    ]


def test_own_variants_are_shown_and_are_no_peers() -> None:
    run = report(**{SERVE: values(**{OURS: 70, "optimum_neuron-plain": 80, "llamacpp": 30})})
    row = next(each for each in peers.compared(run) if each.what == SERVE)
    assert row.lost() == {} and PEERS["optimum_neuron-plain"].label in next(iter(peers.tables(run))).numbers


def test_a_command_is_published_without_the_places_of_its_machine_and_a_table_is_markdown() -> None:
    words = "/x/python -m benchmark.peers --json /a/b.json --rounds 3 --folder=/c --peers a b"
    assert command_line(words.split()) == "python -m benchmark.peers --rounds 3 --peers a b"
    table = Table("t", ("", "system"), ("ms",))
    table.add_row("a", "", "1.0")
    assert table.markdown().splitlines() == ["| | system | ms |", "| --- | --- | --: |", "| a | | 1.0 |"]
