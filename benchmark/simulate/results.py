# SPDX-License-Identifier: Apache-2.0
"""What a simulation gives: a row per setting, which of them meets an objective, and the best one, in words and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from optimum_neuron.config import NeuronConfig
from optimum_neuron.engine.policy import Policy
from optimum_neuron.tune.simulate import Outcome

from .simulation import Workload
from .step_costs import Calibration


KINDS = ("token_generation", "chunked_prefill", "mixed")
REMEDIES = {"itl_p99_ms": "smaller --chunk-sizes", "ttft_p99_ms": "more --replicas"}


class Setting(NamedTuple):
    """What distinguishes a row; users are 0 in an open loop."""

    users: int
    replicas: int
    policy: Policy
    batch_size: int
    chunk_size: int
    ctx_batch_size: int

    def describe(self) -> str:
        replicas = f", {self.replicas} replicas" if self.replicas > 1 else ""
        return f"{self.policy}, batch {self.batch_size}, chunk {self.ctx_batch_size} x {self.chunk_size}{replicas}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """All replicas of one setting together, where those that were simulated stand for the others.

    Attributes:
        padded: share of the computed prompt tokens that were padding.
        steps: by kind.
        seconds: simulated, of the replica that took longest.
        busy: share of the time in which a step ran.
        rows_used: share of the decode rows that advanced a request.
        timeline: start, duration (seconds) and kind of some steps of the first replica in a row.
    """

    setting: Setting
    tok_s: float
    req_s: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_mean_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    itl_max_ms: float
    queue_mean_ms: float
    padded: float
    steps: dict[str, int]
    seconds: float
    busy: float
    rows_used: float
    timeline: list[tuple[float, float, str]]

    @classmethod
    def of(cls, setting: Setting, config: NeuronConfig, outcomes: list[Outcome]) -> Row:
        ttft, itl, queue = (
            np.concatenate([getattr(outcome, name) for outcome in outcomes]) * 1000
            for name in ("ttft", "itl", "queue")
        )
        counted = [outcome.statistics for outcome in outcomes]
        padding, prompt = sum(one.padded_prompt_tokens for one in counted), sum(one.prompt_tokens for one in counted)
        used, idle = sum(one.decode_tokens for one in counted), sum(one.idle_decode_rows for one in counted)
        steps = {kind: sum(outcome.kinds[kind] for outcome in outcomes) for kind in KINDS}
        scale = setting.replicas / len(outcomes)
        return cls(
            setting=setting,
            tok_s=scale * sum((len(outcome.ttft) + len(outcome.itl)) / outcome.seconds for outcome in outcomes),
            req_s=scale * sum(outcome.finished / outcome.seconds for outcome in outcomes),
            ttft_mean_ms=float(ttft.mean()),
            ttft_p50_ms=float(np.percentile(ttft, 50)),
            ttft_p99_ms=float(np.percentile(ttft, 99)),
            itl_mean_ms=float(itl.mean()),
            itl_p50_ms=float(np.percentile(itl, 50)),
            itl_p99_ms=float(np.percentile(itl, 99)),
            itl_max_ms=float(itl.max()),
            queue_mean_ms=float(queue.mean()),
            padded=padding / max(padding + prompt, 1),
            steps={kind: number for kind, number in steps.items() if number},
            seconds=max(outcome.seconds for outcome in outcomes),
            busy=sum(outcome.busy for outcome in outcomes) / sum(outcome.seconds for outcome in outcomes),
            rows_used=used / max(used + idle, 1),
            timeline=outcomes[0].timeline,
        )


class Check(NamedTuple):
    """A published run, simulated."""

    name: str
    published: dict[str, float]
    simulated: dict[str, float]


class Objective(NamedTuple):
    """Limits in milliseconds; None is no limit."""

    itl_p99_ms: float | None = None
    ttft_p99_ms: float | None = None

    def excess(self, row: Row) -> dict[str, float]:
        """By limit: what the row has over what it may have; above 1 the limit is not met."""
        return {name: getattr(row, name) / limit for name, limit in self._asdict().items() if limit is not None}

    def is_met(self, row: Row) -> bool:
        return all(ratio <= 1 for ratio in self.excess(row).values())


@dataclass(frozen=True)
class Report:
    """All results of one run; `workload` is what the rows have in common."""

    calibration: Calibration
    checks: list[Check]
    workload: Workload
    rows: list[Row]
    objective: Objective

    def to_dict(self) -> dict[str, Any]:
        """JSON-serializable."""
        rows = []
        for row in self.rows:
            shown = {**row.setting._asdict(), **asdict(row), "meets_objective": self.objective.is_met(row)}
            rows.append({name: value for name, value in shown.items() if name not in ("setting", "timeline")})
        workload = {name: value for name, value in asdict(self.workload).items() if name not in ("users", "requests")}
        return {
            "benchmark": "simulate",
            "calibration": asdict(self.calibration),
            "check": [check._asdict() for check in self.checks],
            "workload": workload,
            "objective": self.objective._asdict(),
            "rows": rows,
            "recommendation": recommendations(self.rows, self.objective),
        }


def recommendations(rows: list[Row], objective: Objective) -> list[str]:
    """One sentence for each number of users."""
    sentences = []
    for users, group in groupby(rows, lambda row: row.setting.users):
        whom = f"For {users:,} users" if users else "At this rate"
        sentences.append(f"{whom}, {_recommend(list(group), objective)}")
    return sentences


def _recommend(rows: list[Row], objective: Objective) -> str:
    meeting = [row for row in rows if objective.is_met(row)]
    if meeting:
        fewest = min(row.setting.replicas for row in meeting)
        best = max((row for row in meeting if row.setting.replicas == fewest), key=lambda row: row.tok_s)
        why = (
            "has the best throughput"
            if objective == Objective()
            else "has the best throughput that meets the objective"
        )
        if len({row.setting.replicas for row in rows}) > 1:
            why += " with the fewest replicas"
        return f"{best.setting.describe()} {why}: {_figures(best)}."
    nearest = min(rows, key=lambda row: max(objective.excess(row).values()))
    unmet = [name for name in objective.excess(nearest) if all(objective.excess(row)[name] > 1 for row in rows)]
    limits = " and ".join(f"{_limit(name)} of {getattr(objective, name):g} ms" for name in unmet)
    what = f"nothing meets the {limits}" if unmet else "each limit is met by some setting, but all of them by none"
    remedy = " or ".join(REMEDIES[name] for name, ratio in objective.excess(nearest).items() if ratio > 1)
    return f"{what}; {nearest.setting.describe()} comes nearest: {_figures(nearest)}; try {remedy}."


def _limit(name: str) -> str:
    return name.removesuffix("_p99_ms").upper() + " p99"


def _figures(row: Row) -> str:
    return f"{row.tok_s:,.0f} tok/s, ITL p99 {row.itl_p99_ms:,.0f} ms, TTFT p99 {row.ttft_p99_ms:,.0f} ms"
