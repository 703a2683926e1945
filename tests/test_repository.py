# SPDX-License-Identifier: Apache-2.0
"""What surrounds the code: changelog, hooks and workflows agree with the package, the Makefile and the scripts."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest
import yaml
from documents import ROOT

from optimum_neuron import __version__


MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_changelog_begins_with_the_version_of_the_package() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(.+?)\] - (?:unreleased|\d{4}-\d{2}-\d{2})$", text, re.MULTILINE)
    assert versions[0] == __version__ and len(set(versions)) == len(versions) == text.count("\n## ")


def test_hooks_run_what_make_lint_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    entries = {hook["entry"].removesuffix(" --force-exclude") for hook in hooks}
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert recipe and entries == set(re.findall(r"\$\(BIN\)/(.+)", recipe[1]))


def test_workflows_run_scripts_that_are_there() -> None:
    scripts = []
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
        steps = [shlex.split(step["run"]) for job in jobs.values() for step in job["steps"] if "run" in step]
        scripts += [words[1] for words in steps if words[0] == "bash"]
    assert scripts == [".ci/run"] and (ROOT / scripts[0]).is_file()


def test_what_grows_past_its_budget_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    house = runpy.run_path(str(ROOT / ".ci" / "house.py"))
    budgets = house["BUDGETS"].read_text(encoding="utf-8")
    assert re.search(r"^commands = \d+$", budgets, re.MULTILINE)
    small = tmp_path / "budgets.cfg"
    small.write_text(re.sub(r"(?m)^(commands|functions of one name) = \d+$", r"\1 = 3", budgets), "utf-8")
    monkeypatch.setitem(house["main"].__globals__, "BUDGETS", small)
    assert house["main"]() == 1
    lines, names = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"lines, commands: [\d,]+, and its budget is 3; make it smaller, or change .* on purpose", lines
    )
    assert names.startswith("names, functions of one name: ")
