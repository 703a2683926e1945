# SPDX-License-Identifier: Apache-2.0
"""The page of an artifact in a real browser: it breaks no policy, nothing hostile runs, and it fits wide and narrow windows."""

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

from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.tools.inspect.collect import collect_facts
from optimum_neuron.tools.inspect.html import render_page


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


# Writes the page's width, and the height of its highest row, where a test reads them.
MEASURE = """<script>
  document.documentElement.dataset.width = document.documentElement.scrollWidth;
  document.documentElement.dataset.highest = Math.max(...[...document.querySelectorAll("tr")].map((row) => row.offsetHeight));
</script>"""


@pytest.mark.parametrize("width", [500, pytest.param(1000, marks=pytest.mark.full)])
def test_a_browser_shows_all_of_the_page(cpu_artifact: Callable[[str], Path], tmp_path: Path, width: int) -> None:
    text = render_page(everything(collect_facts(Artifact.open(cpu_artifact("llama"))), "plain"))
    _, console, picture = visit(text, tmp_path, width)
    assert console == ""
    pixels = imread(picture)[..., :3]
    assert pixels.shape[:2] == (900, width)
    assert len({tuple(pixel) for pixel in (pixels[::3, ::3].reshape(-1, 3) * 255).astype(int).tolist()}) > 30
    measured = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", text).replace(
        "</body>", f"{MEASURE}</body>"
    )
    dom, _, _ = visit(measured, tmp_path, width)
    sizes = {name: int(value) for _, name, value in Page(dom).attributes if name in ("data-width", "data-highest")}
    assert sizes["data-width"] <= width and sizes["data-highest"] < 110


def test_nothing_of_an_artifact_runs_in_a_browser(cpu_artifact: Callable[[str], Path], tmp_path: Path) -> None:
    text = render_page(everything(collect_facts(Artifact.open(cpu_artifact("llama"))), HOSTILE))
    # If text of an artifact did become a script, the policy would not let it run.
    broken = text.replace("<section", "<script>document.documentElement.dataset.owned=2</script><section", 1)
    assert broken != text
    for page, refused in ((text, False), (broken, True)):
        dom, console, _ = visit(page, tmp_path, 390)
        assert 'id="export"' in dom and "data-owned" not in dom
        assert ("Content Security Policy" in console) == refused and (refused or console == "")
