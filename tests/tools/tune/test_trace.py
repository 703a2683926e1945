# SPDX-License-Identifier: Apache-2.0
"""Traces and limits: the formats that people have, what is wrong in them, and what answers have of limits."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import pytest
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st

from optimum_neuron.tools.tune.slo import Answer, Figures, Limit, Slo
from optimum_neuron.tools.tune.trace import RequestTrace, SharedPart, TracedRequest, read_trace


OWN = "arrival,prompt_tokens,new_tokens\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def read(folder: Path, text: str | bytes) -> RequestTrace:
    file = folder / "trace"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_trace(file)


def lengths(trace: RequestTrace) -> list[tuple[float, int, int]]:
    return [(round(each.arrival, 6), each.prompt_tokens, each.new_tokens) for each in trace.requests]


@pytest.mark.parametrize(
    "text",
    [
        OWN + "10,30,4\n\n12.5,7,1\n",
        "\ufeff" + OWN + "12.5,7,1\r\n10,30,4\r\n",  # of a spreadsheet, and in another order
        "new_tokens,note,arrival,prompt_tokens\n4,x,10,30\n1,,12.5,7\n",
        '{"arrival": 10, "prompt_tokens": 30, "new_tokens": 4}\n{"arrival": 12.5, "prompt_tokens": 7, "new_tokens": 1}',
        AZURE + "2023-11-16 23:59:59.0000000,30,4\n2023-11-17 00:00:01.5000000,7,1\n",
        AZURE + "2024-05-10 00:00:00.009930+00:00,30,4\n2024-05-10 02:00:02.509930+02:00,7,1\n",
        '{"timestamp": 10000, "input_length": 30, "output_length": 4}\n'
        '{"timestamp": 12500, "input_length": 7, "output_length": 1, "hash_ids": [3]}',
    ],
    ids=["csv", "bom", "columns", "json", "azure", "azure-zone", "mooncake"],
)
def test_formats_hold_the_same_trace(text: str, tmp_path: Path) -> None:
    assert lengths(read(tmp_path, text)) == [(0.0, 30, 4), (2.5, 7, 1)]


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        (OWN, 0, "holds no requests"),
        (OWN + "1,5,3\n-1,5,3\n", 3, "arrival -1 is negative"),
        (OWN + "x,5,3\n", 2, "arrival 'x' is no number"),
        (OWN + "1,99999999999,3\n", 2, "is no whole number from 1 to 16,777,216"),
        (OWN + "1,5\n", 2, "has 2 values for the 3 columns"),
        (OWN + '1,"5,3\n', 2, "is no line of CSV"),
        ("a,b\n1,2\n", 2, "no known trace has the fields a, b"),
        ("[1]", 1, "is no JSON object"),
        ('{"arrival": 1', 1, "is not JSON"),
        ('{"arrival": 1, "prompt_tokens": 4, "new_tokens": 1, "prefix": "a"}', 1, "prefix_tokens is missing"),
        ('{"arrival": 1, "prompt_tokens": 4, "new_tokens": 1, "prefix": "a", "prefix_tokens": 5}', 1, "prefix_tokens 5 of a prompt of 4"),
        (AZURE + "yesterday,5,3\n", 2, "TIMESTAMP 'yesterday' is no time"),
        ('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}', 1, "1 hash_ids for an input_length of 600; it has 2 blocks"),
        ('{"timestamp": 0, "input_length": 6, "output_length": 1, "hash_ids": 1}', 1, "hash_ids 1 is no list"),
        (b"\xff\xfe\x00", 0, "is no text in UTF-8"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_line(text: str | bytes, line: int, told: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as raised:
        read(tmp_path, text)
    message = str(raised.value)
    assert told in message and message.startswith(f"{tmp_path / 'trace'}{f':{line}' if line else ''}")


@given(text=st.text('0159.,-"\n{}[]: ae\u00e9', max_size=30) | st.binary(max_size=30))
@examples(60)
def test_any_file_is_a_trace_or_one_sentence(text: str | bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    data = text if isinstance(text, bytes) else (OWN + text).encode("utf-8", "replace")
    try:
        assert read(tmp_path_factory.mktemp("trace"), data).requests
    except ValueError as error:
        assert str(error)


def test_prompts_start_alike_where_the_trace_says_so(tmp_path: Path) -> None:
    line = '{{"timestamp": {0}, "input_length": 700, "output_length": 1, "hash_ids": {1}}}'
    trace = read(tmp_path, "\n".join(line.format(n, ids) for n, ids in enumerate(([1, 2], [1, 3], [4, 2], [1, 2]))))
    first, other_end, other_start, same = trace.draw_prompts(100)
    assert trace.shares_prefixes
    assert {len(prompt) for prompt in (first, other_end, other_start, same)} == {700} and first.max() < 100
    assert np.array_equal(first[:512], other_end[:512]) and not np.array_equal(first[512:], other_end[512:])
    assert not np.array_equal(first[:512], other_start[:512]) and np.array_equal(first, same)
    assert np.array_equal(trace.draw_prompts(100)[1], other_end)


def test_the_longest_request_decides_the_sequence_length() -> None:
    def one(arrival: float, prompt: int, *shared: SharedPart) -> TracedRequest:
        return TracedRequest(arrival, prompt, 57, shared, f"file:{prompt}")

    trace = RequestTrace.from_requests([one(0, 200), one(1, 129), one(2, 128)], "t")
    assert trace.sequence_length == 256
    trace.check_length(256)
    told = r"file:200: 200 prompt tokens and 57 new ones do not fit --sequence-length 255; raise it to 256"
    with pytest.raises(ValueError, match=told):
        trace.check_length(255)


ANSWERS = [Answer(0.0, 0.1, array("d", [1.0, 1.1, 1.2])), Answer(2.0, 2.5, array("d", [5.0, 5.3]))]


WRONG_LIMITS = {
    "ttft=2": "'ttft=2', which is no limit",
    "ttft=0ms": "which nothing meets; give a time above 0",
    "ttft.p101=2s": "p101 is no percentile",
    "tpot=2s": "'tpot' is no metric; choose one of ttft, itl, e2e",
    "ttft=2s,ttft.p99=3s": "limits ttft p99 twice",
    f"ttft={'9' * 400}s": "give a time above 0",
}


def test_wrong_limits_are_refused() -> None:
    for text, told in WRONG_LIMITS.items():
        with pytest.raises(ValueError) as raised:
            Slo.parse_limits(text)
        assert told in str(raised.value)


def test_shares_of_limits_and_requests_that_keep_them() -> None:
    limits = Limit("ttft", 99, 2.0), Limit("itl", 99.9, 0.05), Limit("e2e", 50, 0.5)
    assert Slo.parse_limits("ttft=2s, itl.p99.9=50ms,e2e.p50=.5s").limits == limits
    slo = Slo.parse_limits("ttft.p50=2s,itl.p100=200ms")
    assert [round(share, 6) for share in slo.shares_used(ANSWERS).values()] == [1.0, 1.5]
    assert slo.attainment(ANSWERS) == 0.5
    one_token = [Answer(0.0, 0.0, array("d", [0.5]))]
    assert slo.shares_used(one_token) == {slo.limits[0]: 0.25, slo.limits[1]: 0.0} and slo.attainment(one_token) == 1
    figures = Figures.from_answers(ANSWERS)
    assert figures.tok_s == pytest.approx(5 / 5.3) and figures.req_s == pytest.approx(2 / 5.3)
    assert figures.times["ttft"][50] == pytest.approx(2.0) and figures.times["queue"][50] == pytest.approx(0.3)
    assert figures.times["itl"][99] == pytest.approx(0.3, abs=0.01) and figures.times["e2e"][50] == pytest.approx(2.25)
