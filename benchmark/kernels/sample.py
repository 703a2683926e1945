# SPDX-License-Identifier: Apache-2.0
"""Measures the on-device sampler's kernel against what transformers computes in its place, interleaved.

That is argmax where a request is greedy, else its warpers, softmax and multinomial. The kernel draws from the whole vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from optimum_neuron.kernels.plan.program import Sample
from optimum_neuron.step.spec import GREEDY, SamplingParams

from ..output import Table
from .pairs import Result, compare, run
from .plans import Operands, Run


VOCABULARIES = (49_152, 128_256)
ROWS = (1, 8, 32)
SETTINGS = {
    "greedy": GREEDY,
    "temperature 1": SamplingParams(temperature=1.0),
    "temperature 0.7, top-k 50, top-p 0.9": SamplingParams(50, 0.9, 0.7),
}


def measure_sample(vocab: int, rows: int, setting: str, pairs: int) -> Result:
    logits, uniforms = torch.randn(rows, vocab) * 3, torch.rand(rows)
    plan = plan_sample(logits, SETTINGS[setting], uniforms)
    warpers = warpers_of(SETTINGS[setting])

    def theirs(_: int) -> Tensor:
        if not warpers:
            return logits.argmax(-1)
        ids = torch.empty(rows, 0, dtype=torch.long)
        return torch.multinomial(warpers(ids, logits).softmax(-1), 1)

    milliseconds, times_faster = compare(theirs, lambda _: plan(()), pairs)
    return {"setting": setting, "vocab": vocab, "rows": rows, "ms": milliseconds, "times_faster": times_faster}


def plan_sample(logits: Tensor, sampling: SamplingParams, uniforms: Tensor) -> Run:
    operands = Operands()
    params = torch.tensor(sampling).expand(len(logits), -1).contiguous()
    output = operands.output((len(logits),), torch.int32)
    return operands.bind(Sample(operands(logits), operands(params), operands(uniforms), output))


def warpers_of(sampling: SamplingParams) -> LogitsProcessorList:
    """Those that transformers makes of the same settings; none for a greedy request."""
    warpers = LogitsProcessorList()
    if sampling.temperature > 0:
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(int(sampling.top_k)))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    table = Table("Sampler", ("setting", "vocabulary", "rows"), ("ms", "times faster than transformers"))
    return run("sample", __doc__, table, measure_all, _cells, dtypes=(torch.float32,))


def measure_all(dtype: torch.dtype, pairs: int) -> list[Result]:
    cases = [(vocab, rows, setting) for vocab in VOCABULARIES for rows in ROWS for setting in SETTINGS]
    return [measure_sample(*case, pairs) for case in cases]


def _cells(result: Result) -> Sequence[str]:
    texts = (result["setting"], f"{result['vocab']:,}", str(result["rows"]))
    return (*texts, f"{result['ms']:.3f}", f"{result['times_faster']:.2f}")


if __name__ == "__main__":
    sys.exit(main())
