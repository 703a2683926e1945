# SPDX-License-Identifier: Apache-2.0
"""What the site is made of besides its pages: the reference of commands, the navigation, the drawings. `make docs` builds the whole."""

from __future__ import annotations

import importlib
import json
import sys
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from documents import PAGES, ROOT


pytest.importorskip("sphinx", reason="the extra [docs] is not installed")
DOCS = ROOT / "docs"


@pytest.fixture(autouse=True)
def _import_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(DOCS / "extensions"))
    monkeypatch.syspath_prepend(str(DOCS))
    yield
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent in (DOCS, DOCS / "extensions"):
            del sys.modules[name]


def test_the_reference_has_every_command_and_option_of_the_parsers() -> None:
    reference = importlib.import_module("cli_reference")
    found = dict(reference.commands())
    assert {"optimum-cli export neuron", "optimum-cli neuron serve", "optimum-cli neuron cache lookup"} <= found.keys()
    for words, command in found.items():
        parser = ArgumentParser(prog=words, add_help=False)
        command.parse_args(parser)
        section = reference.section_of(words, command)
        text = section.astext()
        terms = [term.astext() for term in section.findall(lambda node: node.tagname == "term")]
        shown = [action for action in parser._actions if action.help != SUPPRESS]
        assert len(terms) == len(shown) and words in text and "%(default)s" not in text
        for action in shown:
            starts = ", ".join(action.option_strings) or (action.dest, str(action.metavar), "{")
            assert any(term.startswith(starts) for term in terms)
            assert "_" not in "".join(action.option_strings)


def test_a_new_page_stands_in_the_navigation() -> None:
    tree = importlib.import_module("page_tree")
    found = [path.relative_to(ROOT).with_suffix("").as_posix() for path in PAGES]
    source = ["# Title"]
    env = SimpleNamespace(found_docs={*found, "docs/brand-new", "NEURON", "docs/nested/page"})
    tree._add_tree(SimpleNamespace(config=SimpleNamespace(root_doc="docs/index"), env=env), "docs/index", source)
    lines = source[0].splitlines()
    listed = {f"docs/{line}" if not line.startswith("/") else line[1:] for line in lines}
    assert source[0].startswith("# Title") and env.found_docs - {"docs/index"} <= listed
    assert lines.index("brand-new") < lines.index(":caption: Reference")


@pytest.mark.parametrize("name", sorted(path.stem for path in (DOCS / "drawings").glob("*.svg")))
def test_drawings_are_those_that_the_script_draws(name: str) -> None:
    drawings = importlib.import_module("drawings")
    assert set(drawings.DRAWINGS) == {path.stem for path in (DOCS / "drawings").glob("*.svg")}
    drawn = drawings.DRAWINGS[name]().svg()
    assert drawn == (DOCS / "drawings" / f"{name}.svg").read_text(encoding="utf-8"), "run make results"


def test_runs_with_other_runtimes_have_a_picture_each_with_a_mark_for_each_ratio(tmp_path: Path) -> None:
    drawings = importlib.import_module("drawings")
    pictures = drawings.measured(drawings.PUBLISHED)
    assert {path.stem for path in drawings.MEASURED.glob("*")} == pictures.keys()
    for name, drawing in pictures.items():
        assert drawing.svg() == (drawings.MEASURED / f"{name}.svg").read_text(encoding="utf-8"), "run make results"
    found = {"optimum_neuron": {"median": 100}, "openvino": {"median": 50}, "transformers": {"median": 25}}
    run = {"benchmark": "peers", "groups": [{"model": "m", "precision": "int8", "figures": {"prefill, tok/s": found}}]}
    (tmp_path / "mine.json").write_text(json.dumps(run), encoding="utf-8")
    drawn = drawings.measured(tmp_path)["mine"].svg()
    assert drawn.count("<circle") == 2 + 2  # the legend and the ratios
    assert all(f">{text}</text>" in drawn for text in ("m, int8", "prefill", "OpenVINO", "transformers"))


def test_steps_are_drawn_as_wide_as_they_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawings = importlib.import_module("drawings")
    kinds = {"mixed": 30.0, "token_generation": 15.0, "chunked_prefill": 20.0}
    steps = [{"kind": kind, "ms": ms} for kind, ms in kinds.items()]
    run = {"steps": steps, "options": {"slots": 4, "chunk_size": 24}}
    (tmp_path / "stall.json").write_text(json.dumps(run), encoding="utf-8")
    monkeypatch.setattr(drawings, "STEPS", tmp_path / "stall.json")
    widths, sentence = drawings.widths()
    assert widths == {"token_generation": 30.0, "chunked_prefill": 40.0, "mixed": 60.0}
    assert "4 slots, chunks of 24" in sentence and "15.0, 20.0, 30.0 ms" in sentence
    assert 'width="58"' in drawings.steps().svg()
    monkeypatch.setattr(drawings, "STEPS", tmp_path / "nothing.json")
    assert "made up" in drawings.widths()[1]
