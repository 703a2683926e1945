# SPDX-License-Identifier: Apache-2.0
"""Fits the step times of `optimum-cli neuron estimate` to published runs, and lists every run's error.

No device is measured: the runs, with their sources and which of them the fit may not see, stand in published_runs.py, and what was
fitted to them in optimum_neuron/targets/neuron/sdk/step_times.py. Run this after a
change of either, or of how a step's work is counted, and write its constants there.

fit: runs that the constants were fitted to. held: runs that they were not. stranger: held, and nothing of its sizes was
fitted on as many cores of that chip. left out: the error where all runs are fitted but those of its sizes and cores.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from optimum_neuron.cli import reported_errors
from optimum_neuron.targets.neuron.sdk.step_times import STEP_TIMES, StepConstants

from ..options import add_result_options, make_parser
from ..output import Table
from ..section import Report, Section


if TYPE_CHECKING:
    from .published import Measurement

EXAMPLES = """\
examples:
  python -m benchmark.estimate
  python -m benchmark.estimate --json build/benchmark/estimate.json
"""


def main(arguments: list[str] | None = None) -> int:
    """Prints errors and constants; returns the exit code."""
    parser = make_parser("estimate", __doc__, EXAMPLES)
    add_result_options(parser)
    args = parser.parse_args(arguments)
    with reported_errors():
        from .fit import accuracy, fit, left_out_errors
        from .published import measurements

        data = measurements()
        times = fit([one for one in data if not one.run.held_out])
        left_out = left_out_errors(data)
        rows = list(_rows(data, left_out, times))
        found = {kind: asdict(accuracy(data, left_out, kind, times)) for kind in ("decode", "prefill")}
        report = {"benchmark": "estimate", "runs": rows, "accuracy": found, "times": asdict(times)}
        SECTION.finish(report, args.json)
    return 0


def _rows(data: Sequence[Measurement], left_out: Sequence[float], times: StepConstants) -> Iterator[dict[str, object]]:
    from .fit import error, estimated_ms

    for one, off in zip(data, left_out, strict=True):
        run, decodes = one.run, one.kind == "decode"
        yield {
            "seen": "stranger" if one.stranger else "held" if run.held_out else "fit",
            "step": one.kind,
            "model": run.model,
            "target": run.target,
            "cores": run.tensor_parallel_size,
            "rows": run.batch_size if decodes else 1,
            "tokens": 1 if decodes else run.prompt_tokens,
            "context": run.context_length if decodes else run.prompt_context or run.prompt_tokens,
            "published ms": one.milliseconds,
            "estimated ms": estimated_ms(one, times),
            "error": error(one, times),
            "left out": off,
            "source": run.source,
        }


def tables(report: Report) -> Iterator[Table]:
    """Every run, the errors by kind of run, and the constants."""
    rows = report["runs"]
    names = [name for name in rows[0] if name != "source"]
    table = Table("Published runs", names[:4], names[4:])
    for row in sorted(rows, key=lambda row: (str(row["step"]), str(row["seen"]))):
        table.add_row(*(_cell(name, row[name]) for name in names))
    yield table
    found = report["accuracy"]
    medians = Table("Median errors; published / estimated, of four in five strangers", ["step"], list(found["decode"]))
    for kind, errors in found.items():
        medians.add_row(kind, *(f"{value:.3f}" for value in errors.values()))
    yield medians
    constants = Table("Constants", ["constant"], ["fitted", "in step_times.py"])
    for name, value in report["times"].items():
        constants.add_row(name, f"{value:.4g}", f"{getattr(STEP_TIMES, name):.4g}")
    yield constants


ABOUT = """What `optimum-cli neuron estimate` expects of steps, and the times that others published. No device is measured here. Held out: runs of other models \
and software. Strangers: runs without a twin of the same sizes among the fitted ones. [What the columns are](../benchmark/README.md#estimate)."""
SECTION = Section("Estimates and published times", ABOUT, tables)


def _cell(name: str, value: object) -> str:
    if name in ("error", "left out"):
        return f"{value:+.0%}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
