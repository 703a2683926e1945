# SPDX-License-Identifier: Apache-2.0
"""Draws docs/drawings/*.svg, the drawings of concepts.md: what stands in them is asked of the scheduler, of the graphs and of measured steps."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from optimum_neuron import NeuronConfig, Request, SchedulerOptions
from optimum_neuron.engine.scheduler import Scheduler
from optimum_neuron.step.spec import graph_specs


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a script's own folder is docs/

from benchmark.peers import report as peers  # noqa: E402
from benchmark.serving import stall  # noqa: E402
from docs.drawing import COLORS, Drawing, Panel, dots  # noqa: E402


FOLDER, MEASURED = ROOT / "docs" / "drawings", ROOT / "docs" / "measured"
PUBLISHED = ROOT / "benchmark" / "published"
STEPS = PUBLISHED / "stall.json"
DECODE, CHUNK, SECOND, EMPTY = "#4c9be8", "#f2a541", "#7fc97f", "#eceff3"
# Widths of steps without a measurement: decode rows alone, a chunk alone, and both.
MADE_UP = {"token_generation": 20.0, "chunked_prefill": 40.0, "mixed": 50.0}


def widths() -> tuple[dict[str, float], str]:
    """The width of each kind of step, of a chunk 40, and the sentence that says where they are from."""
    if not STEPS.is_file():
        return MADE_UP, "Widths are made up, and a step with both takes longest."
    report = json.loads(STEPS.read_text(encoding="utf-8"))
    ms = {step["kind"]: step["ms"] for step in reversed(report["steps"])}
    times = ", ".join(f"{ms[kind]:.1f}" for kind in MADE_UP)
    sizes = f"{report['options']['slots']} slots, chunks of {report['options']['chunk_size']}"
    return (
        {kind: 40 * ms[kind] / ms["chunked_prefill"] for kind in MADE_UP},
        f"Widths as measured ({sizes}): a decode step, a chunk and both take {times} ms.",
    )


def steps() -> Drawing:
    """Three requests decode, then a prompt of four chunks comes: what the scheduler plans, by policy."""
    drawing = Drawing(760, 350, "Steps when a long prompt comes, by policy")
    for row, (policy, meaning) in enumerate(
        (
            ("mixed", "a chunk and the next token of all others in one step (default)"),
            ("prefill_first", "all chunks of a prompt first"),
        )
    ):
        _timeline(drawing, 20 + row * 155, policy, meaning)
    drawing.box(110, 308, 14, 12, DECODE)
    drawing.text(130, 318, "a new token", size=11)
    drawing.box(220, 308, 14, 12, CHUNK)
    drawing.text(240, 318, "a chunk of the prompt", size=11)
    drawing.text(110, 340, widths()[1], size=11)
    return drawing


def _timeline(drawing: Drawing, top: int, policy: str, meaning: str) -> None:
    config = NeuronConfig(
        batch_size=4, sequence_length=256, prefill_chunk_size=16, mixed_step=policy == "mixed", target="eager"
    )
    scheduler = Scheduler(config, SchedulerOptions(policy=policy))
    for number in range(3):
        scheduler.add_request(
            Request(
                request_id=f"{number}",
                prompt_token_ids=[number * 20 + 3 + each for each in range(4)],
                max_new_tokens=100,
            )
        )
    while len(step_plan := scheduler.schedule().decodes) < 3:
        _run(scheduler)
    assert len(step_plan) == 3
    scheduler.add_request(
        Request(request_id="3", prompt_token_ids=[100 + each for each in range(64)], max_new_tokens=100)
    )
    drawing.text(20, top + 8, f"{policy}: {meaning}", bold=True)
    for slot in range(4):
        drawing.text(100, top + 34 + slot * 28, f"request {slot}", anchor="end", size=11)
    x, taken = 110.0, widths()[0]
    while x < 720:
        step = scheduler.schedule()
        width = taken["token_generation" if not step.pieces else "mixed" if step.decodes else "chunked_prefill"]
        for decode in step.decodes:
            drawing.box(x, top + 20 + int(decode.request_id) * 28, width - 2, 22, DECODE)
        for chunk in step.pieces:
            number = chunk.start // config.prefill_chunk_size + 1
            drawing.box(x, top + 20 + int(chunk.request_id) * 28, width - 2, 22, CHUNK, str(number), 11)
        x += width
        _run(scheduler)


def _run(scheduler: Scheduler) -> None:
    step = scheduler.schedule()
    scheduler.commit(step, [1] * len(step.decodes), [1] * len(step.pieces))


def cache() -> Drawing:
    """Slots of a fixed length, and blocks that rows take as they grow."""
    drawing = Drawing(760, 250, "The KV cache: slots, or blocks")
    fills = (11, 4, 14, 2)
    drawing.text(20, 24, "Slots (default): each row has sequence_length tokens of its own", bold=True)
    for slot, tokens in enumerate((*fills[:3], 0)):
        drawing.text(72, 50 + slot * 24, f"slot {slot}" if slot < 3 else "padding", anchor="end", size=11)
        for column in range(16):
            drawing.box(
                80 + column * 18, 36 + slot * 24, 17, 18, (DECODE, CHUNK, SECOND)[slot] if column < tokens else EMPTY
            )
    drawing.text(
        20,
        152,
        "Blocks (--kv-block-size): rows have as many as their tokens fill, anywhere; a common prefix is shared",
        bold=True,
    )
    shared = 4  # a prefix that rows 0 and 1 have in common
    owners = (shared, 1, 2, 0, 2, 3, 2, 0, 1, 2, None, None, None, None)
    colours = (DECODE, CHUNK, SECOND, "#c39be0", "#f6d365")
    for place, owner in enumerate(owners):
        drawing.box(
            80 + place * 46,
            166,
            44,
            26,
            EMPTY if owner is None else colours[owner],
            "" if owner is None else "0 and 1" if owner == shared else f"row {owner}",
            11,
        )
        drawing.text(102 + place * 46, 206, str(place), anchor="middle", size=10)
    drawing.text(72, 184, "blocks", anchor="end", size=11)
    tables = ("row 0: 0, 3, 7", "row 1: 0, 1, 8", "row 2: 2, 4, 6, 9", "row 3: 5", "free: 10 to 13")
    for number, table in enumerate(tables):
        drawing.text(80 + number * 130, 232, table, size=11)
    drawing.text(72, 232, "tables", anchor="end", size=11)
    return drawing


def graphs() -> Drawing:
    """The family of graphs of one export, as its config asks for them."""
    config = NeuronConfig(
        target="trn2", batch_size=4, sequence_length=4096, prefill_chunk_size=512, prefill_chunk_buckets=(128,)
    )
    found = {(graph.kind, graph.chunk_size, graph.context_length): graph.name for graph in graph_specs(config)}
    rows = [
        ("token_generation", 0),
        *((kind, size) for kind in ("chunked_prefill", "mixed") for size in config.chunk_sizes),
    ]
    drawing = Drawing(760, 300, "Graphs of an export for trn2")
    drawing.text(
        20,
        24,
        f"{len(found)} graphs: --target trn2 --batch-size 4 --sequence-length 4096 --prefill-chunk-buckets 128",
        bold=True,
    )
    for column, context in enumerate(config.context_buckets):
        drawing.text(330 + column * 150, 52, f"context {context}", anchor="middle", size=11)
    for row, (kind, size) in enumerate(rows):
        tokens = {"token_generation": "4 decode rows", "mixed": f"4 decode rows + a chunk of {size}"}.get(
            kind, f"a chunk of {size}"
        )
        drawing.text(20, 82 + row * 42, kind, size=12)
        drawing.text(20, 96 + row * 42, tokens, size=10)
        for column, context in enumerate(config.context_buckets):
            there = (kind, size, context) in found
            fill = (
                {"token_generation": DECODE, "chunked_prefill": CHUNK, "mixed": SECOND}[kind] if there else "#ffffff"
            )
            drawing.box(265 + column * 150, 64 + row * 42, 130, 32, fill, "" if there else "none: no chunk fits", 11)
    drawing.text(
        20,
        286,
        "A step runs in the smallest graph of its kind that holds its chunk and the longest of its contexts.",
        size=11,
    )
    return drawing


def export() -> Drawing:
    """From a checkpoint to an artifact, and to where it runs."""
    drawing = Drawing(760, 290, "From a checkpoint to an artifact, and to where it runs")
    drawing.box(20, 50, 120, 60, EMPTY, "checkpoint")
    drawing.text(80, 128, "config, weights, tokenizer", anchor="middle", size=10)
    drawing.box(190, 50, 150, 60, EMPTY, "step graphs")
    drawing.text(265, 128, "transformers' own modelling code,", anchor="middle", size=10)
    drawing.text(265, 141, "compared with transformers", anchor="middle", size=10)
    drawing.arrow(140, 80, 188, 80)
    for row, (target, text) in enumerate(
        (
            ("cpu", "plans of kernels for any CPU"),
            ("trn1 trn2 trn3 inf2", "HLO, compiled by neuronx-cc"),
            ("hlo", "the same HLO, run by XLA"),
            ("eager", "torch: the reference for all"),
        )
    ):
        drawing.box(390, 20 + row * 50, 130, 34, (DECODE, CHUNK, SECOND, EMPTY)[row], target)
        drawing.text(455, 66 + row * 50, text, anchor="middle", size=9)
        drawing.arrow(340, 80, 388, 37 + row * 50)
        drawing.arrow(520, 37 + row * 50, 566, 130)
    drawing.text(570, 30, "artifact", bold=True)
    files = (
        "config.json",
        "generation_config.json",
        "tokenizer.json ...",
        "graphs/<name>.<suffix>",
        "weights/model.safetensors",
        "neuron_config.json",
    )
    for row, name in enumerate(files):
        drawing.box(570, 40 + row * 32, 172, 27, CHUNK if row == 5 else EMPTY, name, 11)
    drawing.text(570, 250, "the manifest: options, versions,", size=10)
    drawing.text(570, 263, "a sha256 of each file; written last", size=10)
    return drawing


def isolation() -> Drawing:
    """One prompt, cut and accompanied in three ways, and the same bits."""
    drawing = Drawing(760, 215, "A prompt gives the same bits whatever its chunks and neighbours")
    drawing.text(20, 24, "The same prompt of 12 tokens, cut and accompanied in three ways", bold=True)
    for row, (cuts, neighbours) in enumerate((((12,), 0), ((4, 4, 4), 2), ((5, 7), 3))):
        x, top = 130, 42 + row * 50
        drawing.text(120, top + 20, ("alone", "two neighbours", "three neighbours")[row], anchor="end", size=11)
        for cut in cuts:
            width = cut * 20
            drawing.box(x, top, width - 3, 18, CHUNK, f"{cut} tokens", 10)
            for number in range(neighbours):
                drawing.box(x + number * 24, top + 21, 20, 12, DECODE)
            x += width + 8
        drawing.arrow(x, top + 10, 560, 100)
    drawing.box(564, 78, 170, 44, SECOND, "the same logits, to the bit")
    drawing.text(
        20,
        204,
        "Each token of a step is computed by the same arithmetic in the same order, whatever else the step holds.",
        size=11,
    )
    return drawing


DRAWINGS = {each.__name__: each for each in (steps, cache, graphs, export, isolation)}


def runtimes(report: peers.Report) -> Drawing:
    """How many times better this project is than each other runtime, row by row."""
    panels = []
    for group in report["groups"]:
        rows: dict[str, dict[str, float]] = {}
        for row in peers.compared({**report, "groups": [group]}):
            ahead = {name: 1 / times for name, times in row.ahead().items() if times < math.inf}
            if ahead:
                rows[row.name] = ahead
        if rows:
            axis = "times better than the other runtime, above 1 this project wins"
            panels.append(Panel(peers.place(group), axis, rows, 1))
    return dots(peers.SECTION.picture, panels)


STALL_SYSTEMS = {"mixed": "this project", "prefill_first": "the whole prompt first", "transformers": "transformers"}


def long_prompt(report: peers.Report) -> Drawing:
    """What a long prompt costs those who decode, and what that costs the newcomer."""
    numbers, workload = report["numbers"]["stall"], report["workloads"]["stall"]
    drawing = Drawing(760, 250, stall.SECTION.picture)
    prompt, decodes = workload["long_prompt"], workload["decodes"]
    drawing.text(20, 26, f"A prompt of {prompt:,} tokens comes while {decodes} requests decode", bold=True, size=14)
    panels = (
        ("the longest pause of those who decode, ms", "itl_max_ms"),
        ("the first token of the newcomer: the price, ms", "ttft_ms"),
    )
    for number, (title, key) in enumerate(panels):
        top = 58 + number * 96
        drawing.text(20, top, title, bold=True)
        values = {name: numbers[name][key] for name in STALL_SYSTEMS if name in numbers}
        for row, (name, value) in enumerate(values.items()):
            y = top + 12 + row * 22
            drawing.text(165, y + 13, STALL_SYSTEMS[name], anchor="end", size=11)
            drawing.box(175, y, max(500 * value / max(values.values()), 2), 17, COLORS[row])
            drawing.text(183 + 500 * value / max(values.values()), y + 13, f"{value:,.0f}", size=11)
    return drawing


MEASURED_PICTURES = {"peers": runtimes, "stall": long_prompt}


def measured(folder: Path) -> dict[str, Drawing]:
    """Draw each published run that has a picture; the names are those of the runs' files."""
    reports = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    return {
        name: MEASURED_PICTURES[report["benchmark"]](report)
        for name, report in reports.items()
        if report["benchmark"] in MEASURED_PICTURES
    }


def main() -> None:
    pictures = {FOLDER / f"{name}.svg": draw() for name, draw in DRAWINGS.items()}
    pictures |= {MEASURED / f"{name}.svg": drawing for name, drawing in measured(PUBLISHED).items()}
    for folder in (FOLDER, MEASURED):
        folder.mkdir(exist_ok=True)
        for stale in set(folder.glob("*.svg")) - pictures.keys():
            stale.unlink()
    for path, drawing in pictures.items():
        path.write_text(drawing.svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
