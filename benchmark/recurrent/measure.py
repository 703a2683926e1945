# SPDX-License-Identifier: Apache-2.0
"""The cases of one shape: this runtime and transformers in turn, the parts of a step, and the sizes of an artifact."""

from __future__ import annotations

import math
import statistics
import tempfile
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from optimum_neuron import progress
from optimum_neuron.artifact.artifact import WEIGHTS_NAME, Artifact
from optimum_neuron.generate.model import NeuronModelForCausalLM
from optimum_neuron.runtime.profile import Profile
from optimum_neuron.tools.bench.measure import Spread

from ..machine import Limits, OtherProcesses
from ..model import export, generate_config, load_transformers
from ..systems import OURS, Call, PromptSource, System, load_ours, timed_call
from .results import PARTS


_KEPT = ("kv_cache.state_", "kv_cache.conv_")
# By the first word of an operator's name.
OPERATORS = {
    "Walk": "recurrence",
    "Convolve": "convolution",
    "Linears": "linear layers",
    "Attend": "attention",
    "WriteCache": "attention",
    "Map": "elementwise",
}
# Calls that are profiled, and decode steps of each.
CALLS, _STEPS = 3, 4


def measure_shape(
    shape: str, model: Path, dtype: str, args: Namespace, new_tokens: int, folder: Path
) -> list[dict[str, Any]]:
    """Return all cases of one model and type, over one copy of the peer."""
    longest = args.prompt_lengths[-1] + new_tokens
    with progress.stage(f"Exporting {shape} in {dtype}"):
        exports = {rows: export(str(model), generate_config(dtype, rows, longest), folder).path for rows in args.rows}
    peer = System("eager", load_transformers(str(model), dtype))
    sizes = [(rows, length) for rows in args.rows for length in args.prompt_lengths[: None if rows == 1 else 1]]
    cases = []
    with progress.stage(f"Measuring {shape} in {dtype}", len(sizes)) as advance:
        for rows, length in sizes:
            ours = load_ours(exports[rows])
            artifact = ours.model.artifact
            prompts = PromptSource(artifact.model.vocab_size, 0)
            case = measure_case([ours, peer], rows, length, new_tokens, args.rounds, prompts)
            del ours
            parts = profile_call(exports[rows], [prompts.draw(rows, length) for _ in range(1 + CALLS)])
            cases.append(
                {
                    "shape": shape,
                    "dtype": dtype,
                    "case": case,
                    "ratios": {peer.name: ratio_of(case["speeds"], peer.name)},
                    "state_bytes": state_bytes(artifact),
                    "weights_bytes": artifact.manifest["files"][WEIGHTS_NAME]["size"],
                    "parts": {kind: {"ms": ms} for kind, ms in parts.items()},
                    "state_shares": {kind: state_share(ms) for kind, ms in parts.items()},
                    "operations": prompt_operations(artifact, rows, length),
                }
            )
            advance(f"{rows} x {length:,} tokens")
    return cases


def measure_case(
    systems: Sequence[System], rows: int, length: int, new_tokens: int, rounds: int, prompts: PromptSource
) -> dict[str, Any]:
    """Measure systems in turn on the same fresh prompts, after a call of each that is not counted."""
    calls: dict[str, list[Call]] = {system.name: [] for system in systems}
    others = OtherProcesses()
    for number in range(rounds + 1):
        fresh = prompts.draw(rows, length)
        for system in systems:
            call = timed_call(system, fresh, new_tokens)
            calls[system.name] += [call] if number else []
    speeds = {
        name: {
            "prefill_tok_s": asdict(Spread.of([rows * length / call.first_token for call in found])),
            "step_ms": asdict(Spread.of([1e3 * call.step for call in found])),
        }
        for name, found in calls.items()
    }
    agreement = {}
    for name, found in calls.items():
        if name != OURS:
            equal = [int((ours.tokens == peer.tokens).sum()) for ours, peer in zip(calls[OURS], found, strict=True)]
            agreement[name] = {"tokens": rounds * rows * new_tokens, "equal_tokens": sum(equal)}
    return {
        "batch_size": rows,
        "prompt_length": length,
        "speeds": speeds,
        "agreement": agreement,
        "other_cores": others.cores(),
    }


def ratio_of(speeds: dict[str, Any], peer: str) -> dict[str, float]:
    """Return by how much this runtime is faster than a peer, by medians."""
    prefill, step = ([speeds[name][what]["median"] for name in (OURS, peer)] for what in ("prefill_tok_s", "step_ms"))
    return {"prefill": prefill[0] / prefill[1], "decode": step[1] / step[0]}


def add_bounds(cases: Sequence[dict[str, Any]], limits: Limits) -> None:
    """Add, by system, how many times as fast as its prefill one is that takes no time but for its products, at the machine's rate."""
    for each in cases:
        shortest = each["operations"] / limits.products[each["dtype"]]
        tokens = each["case"]["batch_size"] * each["case"]["prompt_length"]
        each["at_most"] = {
            name: tokens / speed["prefill_tok_s"]["median"] / shortest
            for name, speed in each["case"]["speeds"].items()
        }


def state_bytes(artifact: Artifact) -> int:
    """Return the bytes of one slot's states of recurrences and convolutions."""
    states = [state for state in artifact.states() if state.name.startswith(_KEPT)]
    return sum(math.prod(state.shape[1:]) * getattr(torch, state.dtype).itemsize for state in states)


def prompt_operations(artifact: Artifact, rows: int, tokens: int) -> int:
    """Return the operations of products with weights: of each token with a layer's matrices, of each row's last one with the head."""
    with safe_open(artifact.file(WEIGHTS_NAME), framework="pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 - it is no dict
    matrices = [shape for shape in shapes if len(shape) == 2]
    vocab_size = artifact.model.vocab_size
    layers = sum(math.prod(shape) for shape in matrices if vocab_size not in shape)
    head = max(math.prod(shape) for shape in matrices if vocab_size in shape)
    return 2 * rows * (tokens * layers + head)


def state_share(ms: Mapping[str, float]) -> float:
    """Return the share of all parts that recurrences and convolutions take."""
    return (ms["recurrence"] + ms["convolution"]) / sum(ms.values())


def profile_call(path: Path, prompts: Sequence[Tensor]) -> dict[str, dict[str, float]]:
    """Return the parts of a prefill run and of a decode step, "prefill" and "decode", as `parts_of` does.

    Args:
        path: of an artifact.
        prompts: each `[rows, tokens]`, for the calls of generate() that are profiled; a first one does not count.
    """
    with tempfile.TemporaryDirectory() as folder, Profile(Path(folder) / "profile") as profile:
        system = System(OURS, NeuronModelForCausalLM.from_pretrained(path, profile=profile))
        for each in prompts:
            system.generate(each, 1 + _STEPS)
        events = profile.trace.to_dict()["traceEvents"]
    return parts_of(events)


def parts_of(events: Iterable[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the milliseconds of a run by what they were for, by kind of graph.

    They are medians over all runs of a graph but the first whose operators the trace has, operators one at a time.
    """
    by_track = {track: [each for each in events if each.get("cat") == track] for track in ("graphs", "operators")}
    runs: dict[str, list[dict[str, float]]] = defaultdict(list)
    operators = iter(by_track["operators"])
    operator = next(operators, None)
    for run in by_track["graphs"]:
        found = dict.fromkeys(PARTS, 0.0)
        while operator is not None and operator["ts"] < run["ts"] + run["dur"]:
            found[OPERATORS.get(operator["name"].partition(" ")[0], "other")] += operator["dur"] / 1000
            operator = next(operators, None)
        if sum(found.values()) and run["args"]["run"] > 1:
            runs["decode" if run["name"].startswith("token_generation") else "prefill"].append(found)
    return {
        kind: {name: statistics.median(run[name] for run in of_kind) for name in PARTS}
        for kind, of_kind in runs.items()
    }
