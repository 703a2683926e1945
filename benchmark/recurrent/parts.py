# SPDX-License-Identifier: Apache-2.0
"""Where the time of a step goes, by the operators of a profile: recurrences and convolutions, whose states slots keep, and all else."""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from optimum_neuron.generate import NeuronModelForCausalLM
from optimum_neuron.runtime.profile import Profile

from ..systems import OURS, System


# By the first word of an operator's name.
PARTS = {
    "Walk": "recurrence",
    "Convolve": "convolution",
    "Linears": "linear layers",
    "Attend": "attention",
    "WriteCache": "attention",
    "Map": "elementwise",
}
OTHER = "other"
STATE_PARTS = ("recurrence", "convolution")
NAMES = (*dict.fromkeys(PARTS.values()), OTHER)
# Calls that are profiled, and decode steps of each.
_CALLS, _STEPS = 3, 4


@dataclass(frozen=True)
class Parts:
    """Milliseconds of a run by what they were for, medians over runs of one graph, operators one at a time.

    Attributes:
        state_share: what of all of them recurrences and convolutions take.
    """

    ms: dict[str, float]

    @property
    def state_share(self) -> float:
        return sum(self.ms[name] for name in STATE_PARTS) / sum(self.ms.values())


def profile_call(path: Path, prompts: Sequence[Tensor]) -> dict[str, Parts]:
    """The parts of a prefill run and of a decode step, "prefill" and "decode".

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


def calls_needed() -> int:
    """How many prompts `profile_call` is to be given."""
    return 1 + _CALLS


def parts_of(events: Iterable[dict[str, Any]]) -> dict[str, Parts]:
    """Those of the events of a trace, by kind of graph: of each graph all runs but the first that were told by operator."""
    by_track = {track: [each for each in events if each.get("cat") == track] for track in ("graphs", "operators")}
    runs: dict[str, list[dict[str, float]]] = defaultdict(list)
    operators = iter(by_track["operators"])
    operator = next(operators, None)
    for run in by_track["graphs"]:
        found = dict.fromkeys(NAMES, 0.0)
        while operator is not None and operator["ts"] < run["ts"] + run["dur"]:
            found[PARTS.get(operator["name"].partition(" ")[0], OTHER)] += operator["dur"] / 1000
            operator = next(operators, None)
        if sum(found.values()) and run["args"]["run"] > 1:
            runs["decode" if run["name"].startswith("token_generation") else "prefill"].append(found)
    return {
        kind: Parts({name: statistics.median(run[name] for run in of_kind) for name in NAMES})
        for kind, of_kind in runs.items()
    }
