# SPDX-License-Identifier: Apache-2.0
"""Where the benchmark of vLLM's steps says that time goes, for calls whose times are known."""

from __future__ import annotations

import pytest

from benchmark.vllm.steps import (
    CORE,
    GRAPH,
    OUTPUTS,
    RUNNER,
    SCHEDULER,
    Recorder,
    Span,
    medians,
    over_rounds,
    steps_of,
    with_idle,
)


def engine_step(start: float, graph: str = "token_generation_context64") -> list[Span]:
    """A step of 10 ms: graph 6, runner 2 beside it, scheduler 0.7, outputs 0.5, the loop the rest."""
    ms = [
        (OUTPUTS, 0.0, 9.9),
        (CORE, 0.0, 9.4),
        (SCHEDULER, 0.1, 0.6),
        (RUNNER, 1.0, 8.0),
        (GRAPH, 2.0, 8.0),
        (RUNNER, 8.2, 9.2),
        (SCHEDULER, 9.2, 9.4),
    ]
    return [
        Span(part, start + begin / 1e3, start + end / 1e3, 1, graph if part == GRAPH else "")
        for part, begin, end in ms
    ]


def test_parts_of_a_step_are_their_own_times() -> None:
    spans = [span for number in range(3) for span in engine_step(number / 100)]
    steps = steps_of(reversed(spans))  # spans are noted when they end, not in this order
    assert len(steps) == 2
    for step in steps:
        assert step.step_ms == pytest.approx(10)
        assert step.graph_ms == pytest.approx(6)
        assert step.plugin_ms == pytest.approx(2)
        assert step.scheduler_ms == pytest.approx(0.5 + 0.2)
        assert step.outputs_ms == pytest.approx(0.5)


def test_calls_of_another_thread_are_not_inside_those_that_they_overlap() -> None:
    runner = [Span(GRAPH, 0.0, 0.001, 2), Span(RUNNER, 0.001, 0.009, 2), Span(GRAPH, 0.004, 0.009, 2)]
    (step,) = steps_of([Span(SCHEDULER, 0.0015, 0.0035, 1), *runner])
    assert step.scheduler_ms == pytest.approx(2)
    assert step.plugin_ms == pytest.approx(3)


def test_medians_are_over_steps_of_the_kind_that_is_asked_for() -> None:
    spans = [*engine_step(0.00), *engine_step(0.01, "mixed_chunk8"), *engine_step(0.03), *engine_step(0.04)]
    found = medians(steps_of(spans), "token_generation")
    assert found["steps"] == 2
    assert found["step_ms"] == pytest.approx(10)
    assert medians(steps_of(spans), "mixed")["step_ms"] == pytest.approx(20)
    with pytest.raises(ValueError, match="none of the 3 steps ran a chunked_prefill graph"):
        medians(steps_of(spans), "chunked_prefill")


def test_graphs_stand_idle_for_what_a_step_takes_beyond_a_graph_that_runs_alone() -> None:
    sync, beside = {"step_ms": 10.0, "graph_ms": 8.0}, {"step_ms": 9.0, "graph_ms": 8.9}
    found = with_idle({"sync": sync, "async": beside}, "sync")
    assert found["sync"]["idle_ms"] == pytest.approx(2)
    assert found["async"]["idle_ms"] == pytest.approx(1)


def test_shares_are_of_the_medians_over_rounds() -> None:
    rounds = [{"step_ms": step, "idle_ms": idle, "plugin_ms": 0.5} for step, idle in ((10, 1), (20, 3), (90, 2))]
    found = over_rounds(rounds)
    assert (found["step_ms"], found["idle_ms"]) == (20, 2)
    assert found["idle_share"] == pytest.approx(0.1)
    assert found["plugin_share"] == pytest.approx(0.025)


def test_a_watched_method_does_what_it_did_and_is_noted_while_the_recorder_is_on() -> None:
    class Executable:
        def run(self, graph: str, inputs: list[int]) -> int:
            if not inputs:
                raise RuntimeError("no inputs")
            return sum(inputs)

    executable, recorder = Executable(), Recorder()
    recorder.watch(executable, "run", GRAPH)
    assert executable.run("a", [1]) == 1
    recorder.on = True
    assert executable.run("b", [1, 2]) == 3
    with pytest.raises(RuntimeError, match="no inputs"):
        executable.run("c", [])
    assert [span.graph for span in recorder.spans] == ["b", "c"]
    assert all(span.end >= span.start for span in recorder.spans)
