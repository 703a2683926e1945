# SPDX-License-Identifier: Apache-2.0
"""Runners that measure what they do, for a profile or a caller. A plain runner has none of this: nothing in its way asks for it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from .. import progress
from ..artifact.artifact import Artifact
from ..core import PromptPiece, StepOutput
from ..step.family import rows_needed
from ..step.spec import GraphSpec
from ..targets import IN_ENVIRONMENT, Executable, RankOptions, get_target
from .profile import Profile, RunTrace, now
from .runner import GraphRunner
from .step_tensors import DecodeRows


def measure_seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes, in seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# Of each graph, the runs that are traced by operator. They take longer than others, and operators are many.
OPERATOR_RUNS = 8


def load_runner(
    artifact: Artifact,
    *,
    trust_native_code: bool,
    trust_remote_code: bool = False,
    deterministic: bool = False,
    ranks: RankOptions = IN_ENVIRONMENT,
    profile: Profile | None = None,
) -> GraphRunner:
    """Load an artifact's graphs, and return a runner over them; the arguments are those of `Target.load` and `GraphRunner`."""
    if profile is not None:
        ranks = replace(ranks, capture=profile.capture_folder(artifact.target))
    with progress.stage("Loading the artifact"):
        executable = get_target(artifact.target).load(
            artifact, trust_native_code=trust_native_code, trust_remote_code=trust_remote_code, ranks=ranks
        )
    described = (artifact.config, artifact.graphs, artifact.model)
    if profile is None:
        return GraphRunner(executable, *described, deterministic=deterministic)
    profile.trace.facts |= {"artifact": str(artifact.path), "target": artifact.target}
    runner = TracedRunner(TracedExecutable(executable, profile.trace), *described, deterministic=deterministic)
    runner.trace = profile.trace
    return runner


class TracedExecutable(Executable):
    """An executable that notes each run of a graph. Each is waited for, so that its time is its own."""

    def __init__(self, executable: Executable, trace: RunTrace) -> None:
        self._executable = executable
        self._trace = trace
        self._runs: Counter[str] = Counter()
        for name in ("touch_states", "idle_inputs", "keep_state", "restore_state", "read_state", "write_state"):
            setattr(self, name, getattr(executable, name))

    def run(self, graph: str, inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return self._note_run(graph, inputs, outputs=True)

    def run_for_states(self, graph: str, inputs: Sequence[np.ndarray]) -> None:
        self._note_run(graph, inputs, outputs=False)

    def _note_run(self, graph: str, inputs: Sequence[np.ndarray], *, outputs: bool) -> Sequence[np.ndarray]:
        self._runs[graph] += 1
        executable, start = self._executable, now()
        found: Sequence[np.ndarray] = ()
        if self._runs[graph] <= OPERATOR_RUNS:
            began = [start]

            def note_operator(operator: str) -> None:
                began.append(self._trace.add_span("operators", operator, began[-1]))

            found = executable.run_by_operators(graph, inputs, note_operator, outputs=outputs)
        elif outputs:
            found = executable.run(graph, inputs)
        else:
            executable.run_for_states(graph, inputs)
        self._trace.add_span("graphs", graph, start, run=self._runs[graph])
        return found

    def copy_slot(self, source: int, destination: int, length: int) -> None:
        start = now()
        self._executable.copy_slot(source, destination, length)
        self._trace.add_span("graphs", "copy_slot", start, source=source, destination=destination, length=length)


class TimedRunner(GraphRunner):
    """A runner that adds up the seconds of its steps in `spent`."""

    spent = 0.0

    def run_step(
        self,
        pieces: Sequence[PromptPiece] = (),
        decode: DecodeRows | None = None,
        graph: GraphSpec | None = None,
        *,
        logits: bool = True,
        outputs: bool = True,
    ) -> StepOutput:
        start = now()
        output = super().run_step(pieces, decode, graph, logits=logits, outputs=outputs)
        self.spent += (now() - start) / 1e9
        self._note_step(pieces, decode, start)
        return output

    def _note_step(self, pieces: Sequence[PromptPiece], decode: DecodeRows | None, start: int) -> None:
        """Take note of a step that began at `start`."""


class TracedRunner(TimedRunner):
    """A runner that notes each step in a trace, and each run of a graph within it."""

    trace: RunTrace

    def _note_step(self, pieces: Sequence[PromptPiece], decode: DecodeRows | None, start: int) -> None:
        name = "decode" if not pieces else "prefill chunk" if decode is None else "mixed"
        decoding = [] if decode is None else np.flatnonzero(decode.active).tolist()
        tokens = [piece.count for piece in pieces]
        rows = rows_needed(tokens, self.config.prefill_chunk_size)
        self.trace.add_count("live rows", start, decode=len(decoding), chunk=rows)
        self.trace.add_span(
            "steps",
            name,
            start,
            decode_slots=decoding,
            chunk_slots=[piece.slot for piece in pieces],
            rows=len(decoding) + rows,
            tokens=len(decoding) + sum(tokens),
        )

    def copy_block(self, source: int, destination: int, length: int) -> None:
        start = now()
        super().copy_block(source, destination, length)
        self.trace.add_span("steps", "copy prefix", start, slot=destination, source=source, tokens=length)

    def warm_up(self) -> None:
        start = now()
        super().warm_up()
        self.trace.add_span("steps", "warm-up", start)
