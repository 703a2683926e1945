# SPDX-License-Identifier: Apache-2.0
"""Runners that tell a profile what they do. A runner without a profile has none of this: nothing on its way asks for one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from ..artifact.artifact import Artifact
from ..step.family import rows_needed
from ..step.spec import GraphSpec
from ..targets import Executable
from .profile import Profile
from .runner import GraphRunner
from .step_tensors import Chunk, DecodeRows, StepOutput
from .trace import Trace, now


# Of each graph, the runs that are traced by operator. They take longer than others, and operators are many.
OPERATOR_RUNS = 8


def open_runner(
    artifact: Artifact, executable: Executable, *, deterministic: bool = False, profile: Profile | None = None
) -> GraphRunner:
    """A runner over an artifact's loaded graphs."""
    if profile is None:
        return GraphRunner(executable, artifact.config, artifact.graphs, artifact.model, deterministic=deterministic)
    profile.trace.facts |= {"artifact": str(artifact.path), "target": artifact.target}
    return TracedRunner(artifact, executable, profile.trace, deterministic=deterministic)


class TracedExecutable(Executable):
    """An executable that notes each run of a graph. Each is waited for, so that its time is its own."""

    def __init__(self, executable: Executable, trace: Trace) -> None:
        self._executable = executable
        self._trace = trace
        self._runs: Counter[str] = Counter()

    def run(self, graph: str, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._note_run(graph, inputs, outputs=True)

    def run_for_states(self, graph: str, inputs: Sequence[Tensor]) -> None:
        self._note_run(graph, inputs, outputs=False)

    def _note_run(self, graph: str, inputs: Sequence[Tensor], *, outputs: bool) -> Sequence[Tensor]:
        self._runs[graph] += 1
        executable, start = self._executable, now()
        found: Sequence[Tensor] = ()
        if self._runs[graph] <= OPERATOR_RUNS:
            found = self._run_by_operators(graph, inputs, outputs=outputs)
        elif outputs:
            found = executable.run(graph, inputs)
        else:
            executable.run_for_states(graph, inputs)
        self._trace.span("graphs", graph, start, run=self._runs[graph])
        return found

    def _run_by_operators(self, graph: str, inputs: Sequence[Tensor], *, outputs: bool) -> Sequence[Tensor]:
        began = now()

        def ended(operator: str) -> None:
            nonlocal began
            began = self._trace.span("operators", operator, began)

        return self._executable.run_by_operators(graph, inputs, ended, outputs=outputs)

    def touch_states(self) -> None:
        self._executable.touch_states()

    def idle_inputs(self) -> Mapping[str, Sequence[Tensor]]:
        return self._executable.idle_inputs()

    def copy_slot(self, source: int, destination: int, length: int) -> None:
        start = now()
        self._executable.copy_slot(source, destination, length)
        self._trace.span("graphs", "copy_slot", start, source=source, destination=destination, length=length)

    def keep_state(self, slot: int, snapshot: int) -> None:
        self._executable.keep_state(slot, snapshot)

    def restore_state(self, snapshot: int, slot: int) -> None:
        self._executable.restore_state(snapshot, slot)

    def read_state(self, name: str) -> Tensor:
        return self._executable.read_state(name)

    def write_state(self, name: str, tensor: Tensor) -> None:
        self._executable.write_state(name, tensor)


class TracedRunner(GraphRunner):
    """A runner that notes each step, and each run of a graph within it."""

    def __init__(
        self, artifact: Artifact, executable: Executable, trace: Trace, *, deterministic: bool = False
    ) -> None:
        traced = TracedExecutable(executable, trace)
        super().__init__(traced, artifact.config, artifact.graphs, artifact.model, deterministic=deterministic)
        self._trace = trace

    def step(
        self,
        chunks: Sequence[Chunk] = (),
        decode: DecodeRows | None = None,
        graph: GraphSpec | None = None,
        *,
        logits: bool = True,
        outputs: bool = True,
    ) -> StepOutput:
        start = now()
        output = super().step(chunks, decode, graph, logits=logits, outputs=outputs)
        name = "decode" if not chunks else "prefill chunk" if decode is None else "mixed"
        decoding = [] if decode is None else np.flatnonzero(decode.active).tolist()
        tokens = [len(chunk.token_ids) for chunk in chunks]
        rows = rows_needed(tokens, self.config.prefill_chunk_size)
        self._trace.count("live rows", start, decode=len(decoding), chunk=rows)
        self._trace.span(
            "steps",
            name,
            start,
            decode_slots=decoding,
            chunk_slots=[chunk.slot for chunk in chunks],
            rows=len(decoding) + rows,
            tokens=len(decoding) + sum(tokens),
        )
        return output

    def reuse(self, slot: int, source: int, length: int, snapshot: int | None = None) -> None:
        start = now()
        super().reuse(slot, source, length, snapshot)
        self._trace.span("steps", "reuse prefix", start, slot=slot, source=source, tokens=length)

    def warm_up(self) -> None:
        start = now()
        super().warm_up()
        self._trace.span("steps", "warm-up", start)
