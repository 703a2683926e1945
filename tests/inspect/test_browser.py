# SPDX-License-Identifier: Apache-2.0
"""The page of an artifact in a real browser: its script runs, it breaks no policy, nothing hostile runs, and something is to be seen."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.image import imread
from test_page import HOSTILE, Page, everything

from optimum_neuron.artifacts.artifact import Artifact
from optimum_neuron.inspect.collect import collect
from optimum_neuron.inspect.html import render


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
# As root there is no sandbox; and nothing is fetched from anywhere.
FLAGS = ("--headless", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--enable-logging=stderr", "--virtual-time-budget=2000")  # fmt: skip

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium")


def visit(page: str, folder: Path, width: int) -> tuple[str, str, Path]:
    """What a browser makes of a page: its elements as HTML, its console, and a picture."""
    assert BROWSER is not None
    (folder / "page.html").write_text(page, encoding="utf-8")
    picture = folder / f"{width}.png"
    root = ("--no-sandbox",) if os.geteuid() == 0 else ()
    done = subprocess.run(
        [BROWSER, *FLAGS, *root, f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900", f"--screenshot={picture}", "--dump-dom",
         (folder / "page.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, "\n".join(console), picture


def test_a_browser_shows_the_page(cpu_artifact: Callable[[str], Path], tmp_path: Path) -> None:
    facts = everything(collect(Artifact.open(cpu_artifact("llama"))), "plain")
    dom, console, picture = visit(render(facts), tmp_path, 1000)
    assert console == ""
    page = Page(dom)
    assert ("html", "data-ready", str(len(facts.graphs))) in page.attributes
    for tag, name, value in (("svg", "class", "grid"), ("tr", "data-compared", "plain"), ("dt", "data-speed", "plain"), ("tr", "data-quantized", "int8")):  # fmt: skip
        assert (tag, name, value) in page.attributes
    buttons = re.findall(r"<button[^>]*>", dom)
    assert len(buttons) == 2 and not any("hidden" in each for each in buttons)
    pixels = imread(picture)[..., :3]
    assert pixels.shape[:2] == (900, 1000)
    assert len({tuple(pixel) for pixel in (pixels[::3, ::3].reshape(-1, 3) * 255).astype(int).tolist()}) > 30


def test_nothing_of_an_artifact_runs_in_a_browser(cpu_artifact: Callable[[str], Path], tmp_path: Path) -> None:
    facts = everything(collect(Artifact.open(cpu_artifact("llama"))), HOSTILE)
    text = render(facts)
    broken = text.replace("<section", "<script>document.documentElement.dataset.owned=2</script><section", 1)
    assert broken != text
    dom, console, _ = visit(text, tmp_path, 390)
    assert "data-ready" in dom and "data-owned" not in dom and console == ""
    dom, console, _ = visit(
        broken, tmp_path, 390
    )  # and if something of it did become a script, the policy would not let it run
    assert "data-ready" in dom and "data-owned" not in dom and "Content Security Policy" in console
