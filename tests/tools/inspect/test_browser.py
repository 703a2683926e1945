# SPDX-License-Identifier: Apache-2.0
"""The page of an artifact in a real browser: it breaks no policy, no text of an artifact runs, and it fits a narrow window."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from helpers import Artifacts
from test_page import HOSTILE, Page, everything

from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.tools.inspect.collect import collect_facts
from optimum_neuron.tools.inspect.html import render_page


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
# As root there is no sandbox; and nothing is fetched from anywhere.
FLAGS = ("--headless", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--enable-logging=stderr", "--virtual-time-budget=2000")  # fmt: skip

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium")


def visit(page: str, folder: Path, width: int) -> tuple[str, str]:
    """Return a page's elements as HTML, and the console of the browser that shows it."""
    assert BROWSER is not None
    (folder / "page.html").write_text(page, encoding="utf-8")
    root = ("--no-sandbox",) if os.geteuid() == 0 else ()
    options = (f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900", "--dump-dom")
    command = [BROWSER, *FLAGS, *root, *options, (folder / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


# Writes the page's width, and the height of its highest row, where a test reads them.
MEASURE = """<script>
  document.documentElement.dataset.width = document.documentElement.scrollWidth;
  document.documentElement.dataset.highest = Math.max(...[...document.querySelectorAll("tr")].map((row) => row.offsetHeight));
</script>"""


def test_a_browser_shows_all_of_the_page_and_runs_nothing(cpu_artifact: Artifacts, tmp_path: Path) -> None:
    width, facts = 500, collect_facts(Artifact.open(cpu_artifact("llama")))
    dom, console = visit(render_page(everything(facts, HOSTILE)), tmp_path, width)
    assert 'id="export"' in dom and "data-owned" not in dom and console == ""
    policy = '<meta http-equiv="Content-Security-Policy"[^>]*>'
    measured = re.sub(policy, "", render_page(everything(facts, "plain"))).replace("</body>", f"{MEASURE}</body>")
    dom, _ = visit(measured, tmp_path, width)
    sizes = {name: int(value) for _, name, value in Page(dom).attributes if name in ("data-width", "data-highest")}
    assert sizes["data-width"] <= width and 10 < sizes["data-highest"] < 110
