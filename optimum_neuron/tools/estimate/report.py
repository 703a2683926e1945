# SPDX-License-Identifier: Apache-2.0
"""The report of estimates: a host to rent, tables of 80 columns, and a JSON document. Estimates nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from math import floor, log10
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ...cli import make_table
from ...step.state_specs import StateSizes, state_specs
from ...targets.neuron.sdk.hardware import GIB, MIB, Instance
from ...targets.neuron.sdk.step_times import DECODE, MEASURED_CORES, PREFILL
from .estimate import Estimate, EstimateReport
from .step_needs import GRAPH_RESERVE
from .step_speed import Speed


# Expected times that differ by a tenth are as good as one another.
_SHORTER = 0.9


def print_report(report: EstimateReport, console: Console) -> None:
    """Print a host to rent and the model, memory per core, speeds of what fits, and the sources of the figures."""
    first, *others = write_sentences(report)
    console.print(first, highlight=False, style="bold")
    console.print(model_line(report), highlight=False)
    console.print("", _memory_table(report), sep="\n")
    if any(one.fits for one in report.estimates):
        console.print("", _speed_table(report), sep="\n")
    console.print()
    for sentence in others:
        console.print(sentence, highlight=False)


def model_line(report: EstimateReport) -> str:
    sizes, config = report.sizes, report.estimates[0].config
    used = f", {sizes.active_parameters / 1e9:,.2f} B of them per token" if sizes.has_experts else ""
    return (
        f"{report.model}: {sizes.parameters / 1e9:,.3f} B parameters{used}, {sizes.spec.depth} layers, {sizes.dtype}; batch "
        f"size {config.batch_size}, sequence length {config.sequence_length:,}, chunks of {config.ctx_batch_size} x "
        f"{config.prefill_chunk_size}"
    )


def _memory_table(report: EstimateReport) -> Table:
    parts = ("weights", "KV", "activ.", "graphs", "total", "of")
    headers = ("tp", *parts, "fits", "largest\nbatch", "longest\nlength")
    table = _make_table("GiB per core; largest sizes with the others as asked", headers)
    for _, group in groupby(report.estimates, lambda one: one.config.target):
        for one in group:
            memory = one.memory
            bytes_of = (memory.weights, memory.kv_cache, memory.activations, memory.reserve, memory.total)
            sizes = (size / GIB for size in bytes_of)
            table.add_row(
                one.config.target,
                str(one.config.tensor_parallel_size),
                *(f"{size / 1e3:,.0f} k" if size >= 1e4 else f"{size:,.{2 if size < 100 else 0}f}" for size in sizes),
                f"{one.hbm / GIB:.0f}",
                "yes" if one.fits else "no",
                *(f"{most:,}" if most else "-" for most in (one.largest_batch, one.longest_sequence)),
                style=None if one.fits else "dim",
            )
        table.add_section()
    return table


def _speed_table(report: EstimateReport) -> Table:
    steps = ("decode\nms/step", "decode\ntokens/s", "decode\nat most", "prefill\ntokens/s", "prefill\nat most")
    table = _make_table(f"One copy, all rows in use, {report.context_length:,} tokens in the cache", ("tp", *steps))
    table.add_column("smallest\nhost", no_wrap=True)
    fitting = [one for one in report.estimates if one.fits]
    for _, group in groupby(fitting, lambda one: one.config.target):
        for one in group:
            rates = [span for speed in (one.decode, one.prefill) for span in (speed.rates, (speed.peak_rate,) * 2)]
            table.add_row(
                one.config.target,
                str(one.config.tensor_parallel_size) + ("" if _is_measured(one) else "?"),
                _span_text(one.decode.low_s * 1e3, one.decode.high_s * 1e3),
                *(_span_text(*span) for span in rates),
                one.hosts[0].size,
            )
        table.add_section()
    return table


def _make_table(title: str, numbers: Sequence[str]) -> Table:
    table = make_table(title, ("target",), numbers)
    table.box, table.padding, table.show_edge = box.SIMPLE_HEAD, (0, 1, 0, 0), False
    return table


def _is_measured(one: Estimate) -> bool:
    least, most = MEASURED_CORES
    return least <= one.config.tensor_parallel_size <= most


def _span_text(low: float, high: float) -> str:
    """Return both ends with two digits that count, or one end where they are the same; thousands as k, millions as M."""
    unit, scale = next((unit, scale) for unit, scale in ((" M", 1e6), (" k", 1e3), ("", 0)) if high >= 10 * scale)
    ends: dict[str, None] = {}
    for end in (low / (scale or 1), high / (scale or 1)):
        places = 1 - floor(log10(end))
        ends[f"{round(end, places):,.{max(places, 0)}f}"] = None
    return "-".join(ends) + unit


def write_sentences(report: EstimateReport) -> list[str]:
    """Return a host to rent, or the reason why none will do; then assumptions and sources."""
    fitting = [one for one in report.estimates if one.fits]
    lines = [_host_to_rent(fitting) if fitting else _nearest_text(report), *report.notes]
    if report.sizes.has_experts:
        lines.append(
            "At most: tokens compute the experts that they are routed to. Otherwise what graphs compute for any routing; no "
            "published run with experts was fitted."
        )
    lines.append(
        f"Weights and cache are exact. Graphs take {GRAPH_RESERVE // MIB} MiB each for their code, which is a guess on the "
        f"safe side."
    )
    kept = StateSizes.measure(state_specs(report.estimates[0].config, report.sizes.spec))
    if kept.per_slot:
        tokens = (
            f", as {round(kept.per_slot / kept.per_token):,} tokens of keys and values do" if kept.per_token else ""
        )
        lines.append(
            f"KV holds what layers keep by slot: {kept.per_slot / MIB:,.{3 if kept.per_slot < MIB else 1}f} MiB of each, whatever its "
            f"length{tokens}."
        )
        if copies := report.estimates[0].config.state_places:
            lines.append(f"KV also holds {copies} copies of that, of which prefixes are continued.")
    if fitting:
        lines.append(
            f"Ranges hold four of five published runs of other models and groups of cores than those that were fitted. Of the runs held out of "
            f"it, estimates are off by {DECODE.held_out:.0%} (decode) and {PREFILL.held_out:.0%} (prefill) in the median; of "
            f"those of other models and groups of cores by {DECODE.strangers:.0%} and {PREFILL.strangers:.0%}."
        )
        if not all(_is_measured(one) for one in fitting):
            least, most = MEASURED_CORES
            lines.append(f"tp?: no run on fewer than {least} cores or more than {most} was published.")
    return lines


def _host_to_rent(fitting: list[Estimate]) -> str:
    """Return the host with the least device memory that holds the model, and one with shorter steps, if there is."""
    host, one = min(((host, one) for one in fitting for host in one.hosts), key=lambda choice: _sort_key(*choice))
    shortest = min(each.decode.expected_s for each in fitting)
    about_as_short = [each for each in fitting if each.decode.expected_s * _SHORTER <= shortest]
    text = (
        f"Rent 1 {host.name}, as no host with less device memory ({host.hbm / GIB:,.0f} GiB) holds the model: "
        f"{_way_text(host, one)}."
    )
    if one not in about_as_short:
        quick = min(about_as_short, key=lambda each: _sort_key(each.hosts[0], each))
        text += f" For shorter steps, 1 {quick.hosts[0].name}: {_way_text(quick.hosts[0], quick)}."
    return text


def _sort_key(host: Instance, one: Estimate) -> tuple[float, ...]:
    """Sort less memory to pay for first, then a group as published, more tokens per second, fewer cores."""
    tokens = one.copies_on(host) * one.decode.expected_rate
    return host.hbm, not _is_measured(one), -tokens, one.config.tensor_parallel_size


def _way_text(host: Instance, one: Estimate) -> str:
    copies, cores = one.copies_on(host), one.config.tensor_parallel_size
    many = f"{copies} copies on" if copies > 1 else "1 copy on"
    each = f"{cores} core{'s' if cores > 1 else ''}{' each' if copies > 1 else ''}"
    return (
        f"{many} {each} (--target {one.config.target} --tensor-parallel-size {cores}), "
        f"{_span_text(*(copies * rate for rate in one.decode.rates))} tokens/s decoded"
    )


def _nearest_text(report: EstimateReport) -> str:
    one = min(report.estimates, key=lambda one: one.memory.total / one.hbm)
    config, name = one.config, one.hosts[-1].name
    remedies = []
    if one.largest_batch:
        remedies.append(f"--batch-size {one.largest_batch}")
    if one.longest_sequence:
        remedies.append(f"--sequence-length {one.longest_sequence}")
    if config.dtype == "float32":
        remedies.append("--dtype bfloat16")
    remedy = f"try {' or '.join(remedies)}" if remedies else "take a smaller model"
    return (
        f"Nothing to rent: the nearest, {config.target} with tensor_parallel_size={config.tensor_parallel_size} ({name}), needs "
        f"{one.memory.total / GIB:,.1f} GiB per core and has {one.hbm / GIB:.0f}; {remedy}."
    )


def to_json(report: EstimateReport) -> dict[str, Any]:
    sizes = report.sizes
    kept = StateSizes.measure(state_specs(report.estimates[0].config, sizes.spec))
    return {
        "model": report.model,
        "parameters": sizes.parameters,
        "parameters_per_token": sizes.active_parameters,
        "dtype": sizes.dtype,
        "context_length": report.context_length,
        "cache_bytes_per_token": kept.per_token,
        "state_bytes_per_slot": kept.per_slot,
        "estimates": [
            {
                "config": one.config.to_dict(),
                "fits": one.fits,
                "memory": asdict(one.memory) | {"total": one.memory.total, "hbm": one.hbm},
                "largest_batch": one.largest_batch,
                "longest_sequence": one.longest_sequence,
                "decode": _speed_json(one.decode),
                "prefill": _speed_json(one.prefill),
                "hosts": {host.name: {"cores": host.cores, "copies": one.copies_on(host)} for host in one.hosts},
            }
            for one in report.estimates
        ],
        "notes": write_sentences(report),
    }


def _speed_json(speed: Speed) -> dict[str, Any]:
    slow, fast = speed.rates
    rates = {"low_tok_s": slow, "expected_tok_s": speed.expected_rate, "high_tok_s": fast}
    return asdict(speed) | {"peak_tok_s": speed.peak_rate} | rates
