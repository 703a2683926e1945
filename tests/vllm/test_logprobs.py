# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of the graphs and of vLLM's sampler in one table, and requests that neither can answer."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.outputs import LogprobsLists

from optimum_neuron.config import NeuronConfig
from optimum_neuron.runtime.logprobs import TokenLogprobs
from optimum_neuron.vllm.logprobs import join_logprobs
from optimum_neuron.vllm.sampling import check_request, host_reason
from optimum_neuron.vllm.settings import _check_logprobs


ON_TRN2 = NeuronConfig(target="trn2", top_logprobs=5)


def request(name: str) -> Any:
    return SimpleNamespace(request_id=name)


def told(*best: int) -> TokenLogprobs:
    tokens = np.array(best, np.int32)
    return TokenLogprobs(np.array(-0.5), np.array(2), tokens, -tokens.astype(np.float32))


def test_requests_find_their_own_rows_whoever_chose() -> None:
    of_host = LogprobsLists(np.array([[7, 8]], np.int32), np.array([[-3.0, -4.0]], np.float32), np.array([6]))
    on_device = [(request("a"), 1, None), (request("b"), 2, told(5, 6, 4))]
    found = join_logprobs(on_device, [request("c")], of_host, ["c", "a", "b"])
    assert found is not None
    b, c = found.slice_request(2, 1), found.slice_request(0, 1)
    assert b.logprob_token_ids.tolist() == [[2, 5, 6, 4]] and b.logprobs.tolist() == [[-0.5, -5.0, -6.0, -4.0]]
    assert c.logprob_token_ids[:, :2].tolist() == [[7, 8]] and c.logprobs[:, :2].tolist() == [[-3.0, -4.0]]
    assert (b.sampled_token_ranks.tolist(), c.sampled_token_ranks.tolist()) == ([2], [6])
    assert join_logprobs([(request("a"), 1, None)], [], None, ["a"]) is None


@pytest.mark.parametrize("count", [0, 5])
def test_graphs_tell_as_many_as_they_were_exported_for(count: int) -> None:
    params = SamplingParams(logprobs=count)
    check_request(params, ON_TRN2)
    assert host_reason(params, ON_TRN2) is None
    assert host_reason(params, replace(ON_TRN2, top_logprobs=None)) == "logprobs needs logits on the host"


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"logprobs": 6}, "--output-logits, or for logprobs alone with --top-logprobs 6"),
        ({"logprobs": -1}, "--output-logits"),
        ({"logprobs": 6, "presence_penalty": 1.0}, "--output-logits"),
    ],
)
def test_more_is_refused_with_the_remedy(options: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"export it with {remedy}") + "$"):
        check_request(SamplingParams(**options), ON_TRN2)


def test_a_mode_that_graphs_do_not_know_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"--logprobs-mode processed_logits needs logits on the host"):
        _check_logprobs("processed_logits", ON_TRN2)
    _check_logprobs("raw_logprobs", ON_TRN2)
    _check_logprobs("processed_logits", replace(ON_TRN2, output_logits=True))
