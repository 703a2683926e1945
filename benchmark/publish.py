# SPDX-License-Identifier: Apache-2.0
"""Writes what README.md and docs/results.md say of measurements, and their pictures, from the files in benchmark/published.

Each file is what one run of a benchmark wrote by --json. Every row of it stands in docs/results.md. The run in peers.json is also in README.md. A
section of the page stands as long as its file does. A test fails where a document or a picture differs from the files.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

from optimum_neuron.cli import reported_errors

from .estimate import __main__ as estimate
from .generate import first_use, formats
from .http import results as serving_over_http
from .options import make_parser
from .peers import report as peers
from .recurrent import results as recurrent
from .section import Report, Section, page, run_line, verdict
from .serving import stall


ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ROOT / "benchmark" / "published"
README, RESULTS = ROOT / "README.md", ROOT / "docs" / "results.md"
# The runs that README.md shows.
SUMMARY, STALL, SERVE = (PUBLISHED / f"{name}.json" for name in ("peers", "stall", "serve"))
EXAMPLES = """
examples:
  python -m benchmark.peers --json benchmark/published/peers.json && python -m benchmark.publish
"""


# By what a report calls its benchmark, in the order of the page.
SECTIONS: dict[str, Section] = {
    "peers": peers.SECTION,
    "serve": serving_over_http.SECTION,
    "stall": stall.SECTION,
    "first_use": first_use.SECTION,
    "formats": formats.SECTION,
    "recurrent": recurrent.SECTION,
    "estimate": estimate.SECTION,
}


def reports(folder: Path) -> list[tuple[Path, Section, Report]]:
    """Return the published runs, in the order of the page.

    Raises:
        ValueError: a file that no section shows.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        if report.get("benchmark") not in SECTIONS:
            known = ", ".join(SECTIONS)
            raise ValueError(
                f"{path.name} is of benchmark {report.get('benchmark')!r}, which has no section; known are {known}"
            )
        found.append((path, SECTIONS[report["benchmark"]], report))
    places = list(SECTIONS)
    return sorted(found, key=lambda each: places.index(each[2]["benchmark"]))


def documents(folder: Path) -> Iterator[tuple[Path, str]]:
    """Return each file that follows from the published runs, and its text."""
    pages, taken = [], set()
    for path, section, report in reports(folder):
        text = page(section, report, path)
        if section.title in taken:  # another run of the same benchmark
            text = text.replace(f"## {section.title}", f"## {section.title}: {path.stem}", 1)
        taken.add(section.title)
        pages.append(text)
    yield RESULTS, replaced(RESULTS, {"all": "\n\n".join(pages)})
    blocks: dict[str, str] = {}
    for path, show in ((SUMMARY, summary), (STALL, lambda report: {"stall-run": run_line(report)}), (SERVE, pauses)):
        if (folder / path.name).is_file():
            blocks |= show(json.loads((folder / path.name).read_text(encoding="utf-8")))
    yield README, replaced(README, blocks)


def summary(report: Report) -> dict[str, str]:
    """Return the blocks of README.md."""
    rows = [row for row in peers.compared(report) if row.ahead()]
    lost, level = [row for row in rows if row.lost()], [row for row in rows if row.level()]
    won = len(rows) - len(lost) - len(level)
    table = peers.summary_table(report)
    sentence = f"of {len(rows)} rows {won} won, {len(level)} level, {len(lost)} lost: {', '.join(peers.kinds(lost)) or 'none'}"
    lines = "\n".join(f"- {line}" for line in verdict(rows))
    return {"speed": sentence, "peers": f"{run_line(report)}\n\n{table.markdown()}\n\n{lines}"}


def pauses(report: Report) -> dict[str, str]:
    """Return what README.md says of pauses between tokens under the heaviest load."""
    systems = list(report["numbers"].values())[-1]
    ours, peer = (
        f"{systems[name]['itl_p99_ms']:,.0f}" for name in (serving_over_http.OURS, serving_over_http.VLLM_CPU)
    )
    return {"serve": f"p99 pause {ours} ms, vLLM's CPU backend {peer}"}


def replaced(document: Path, blocks: dict[str, str]) -> str:
    """Return the text of a document with other contents between its markers.

    Raises:
        ValueError: the document has no such markers.
    """
    text = document.read_text(encoding="utf-8")
    for name, content in blocks.items():
        begin, end = f"<!-- results {name} -->", "<!-- end -->"
        before, _, rest = text.partition(begin)
        old, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"{document.name} has no {begin} with an {end}; write both where the numbers go")
        gap = "\n\n" if old.startswith("\n") else ""
        text = f"{before}{begin}{gap}{content}{gap}{end}{after}"
    return text


def main() -> int:
    """Writes all files; returns the exit code."""
    make_parser("publish", __doc__, EXAMPLES).parse_args()
    with reported_errors():
        for path, text in list(documents(PUBLISHED)):
            path.write_text(text, encoding="utf-8")
        runpy.run_path(str(ROOT / "docs" / "drawings.py"), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
