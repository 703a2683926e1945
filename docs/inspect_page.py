# SPDX-License-Identifier: Apache-2.0
"""Draws docs/inspect.png: the upper part of the page that neuron inspect --html writes of an artifact, as Chromium shows it."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.tools.inspect.collect import collect_facts
from optimum_neuron.tools.inspect.html import render_page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path, help="folder that optimum-cli export neuron wrote")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("inspect.png"), help="file to write")
    parser.add_argument("--size", default="1000,1500", help="of the window, in pixels (default: %(default)s)")
    args = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        parser.error("there is no Chromium; install one")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(render_page(collect_facts(Artifact.open(args.artifact))), encoding="utf-8")
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        subprocess.run(
            [
                browser, "--headless", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=2000", *root, f"--user-data-dir={folder}/profile",
                f"--window-size={args.size}", f"--screenshot={args.output.resolve()}", page.as_uri(),
            ],
            check=True, stderr=subprocess.DEVNULL,
        )  # fmt: skip


if __name__ == "__main__":
    main()
