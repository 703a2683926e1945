# SPDX-License-Identifier: Apache-2.0
"""Runners that measure what they do, for a profile or a caller. A plain runner has none of this: nothing in its way asks for it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..artifact.artifact import Artifact
from ..core import PromptPiece, StepOutput
from ..step.family import rows_needed
from ..step.spec import GraphSpec
from ..targets import Executable
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


def open_runner(
    artifact: Artifact, executable: Executable, *, deterministic: bool = False, profile: Profile | None = None
) -> GraphRunner:
    """Return a runner over an artifact's loaded graphs."""
    if profile is None:
        return GraphRunner(executable, artifact.config, artifact.graphs, artifact.model, deterministic=deterministic)
    profile.trace.facts |= {"artifact": str(artifact.path), "target": artifact.target}
    return TracedRunner(artifact, executable, profile.trace, deterministic=deterministic)


class TracedExecutable(Executable):
    """An executable that notes each run of a graph. Each is waited for, so that its time is its own."""

    def __init__(self, executable: Executable, trace: RunTrace) -> None:
        self._executable = executable
        self._trace = trace
        self._runs: Counter[str] = Counter()

    def run(self, graph: str, inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return self._note_run(graph, inputs, outputs=True)

    def run_for_states(self, graph: str, inputs: Sequence[np.ndarray]) -> None:
        self._note_run(graph, inputs, outputs=False)

    def _note_run(self, graph: str, inputs: Sequence[np.ndarray], *, outputs: bool) -> Sequence[np.ndarray]:
        self._runs[graph] += 1
        executable, start = self._executable, now()
        found: Sequence[np.ndarray] = ()
        if self._runs[graph] <= OPERATOR_RUNS:
            began = start

            def ended(operator: str) -> None:
                nonlocal began
                began = self._trace.add_span("operators", operator, began)

            found = executable.run_by_operators(graph, inputs, ended, outputs=outputs)
        elif outputs:
            found = executable.run(graph, inputs)
        else:
            executable.run_for_states(graph, inputs)
        self._trace.add_span("graphs", graph, start, run=self._runs[graph])
        return found

    def touch_states(self) -> None:
        self._executable.touch_states()

    def idle_inputs(self) -> Mapping[str, Sequence[np.ndarray]]:
        return self._executable.idle_inputs()

    def copy_slot(self, source: int, destination: int, length: int) -> None:
        start = now()
        self._executable.copy_slot(source, destination, length)
        self._trace.add_span("graphs", "copy_slot", start, source=source, destination=destination, length=length)

    def keep_state(self, slot: int, snapshot: int) -> None:
        self._executable.keep_state(slot, snapshot)

    def restore_state(self, snapshot: int, slot: int) -> None:
        self._executable.restore_state(snapshot, slot)

    def read_state(self, name: str) -> np.ndarray:
        return self._executable.read_state(name)

    def write_state(self, name: str, array: np.ndarray) -> None:
        self._executable.write_state(name, array)


class TimedRunner(GraphRunner):
    """A runner that adds up how long its steps take.

    Attributes:
        spent: seconds of all steps so far.
    """

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
        """Note a step that began at `start` and ends here."""


class TracedRunner(TimedRunner):
    """A runner that notes each step in a trace, and each run of a graph within it."""

    def __init__(
        self, artifact: Artifact, executable: Executable, trace: RunTrace, *, deterministic: bool = False
    ) -> None:
        traced = TracedExecutable(executable, trace)
        super().__init__(traced, artifact.config, artifact.graphs, artifact.model, deterministic=deterministic)
        self._trace = trace

    def _note_step(self, pieces: Sequence[PromptPiece], decode: DecodeRows | None, start: int) -> None:
        name = "decode" if not pieces else "prefill chunk" if decode is None else "mixed"
        decoding = [] if decode is None else np.flatnonzero(decode.active).tolist()
        tokens = [piece.count for piece in pieces]
        rows = rows_needed(tokens, self.config.prefill_chunk_size)
        self._trace.add_count("live rows", start, decode=len(decoding), chunk=rows)
        self._trace.add_span(
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
        self._trace.add_span("steps", "copy prefix", start, slot=destination, source=source, tokens=length)

    def warm_up(self) -> None:
        start = now()
        super().warm_up()
        self._trace.add_span("steps", "warm-up", start)
