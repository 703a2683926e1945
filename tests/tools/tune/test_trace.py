# SPDX-License-Identifier: Apache-2.0
"""Traces: the formats that people have, what is wrong in a file, and prompts that start alike where the trace says so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st

from optimum_neuron.tools.tune.trace import RequestTrace, SharedPart, TracedRequest
from optimum_neuron.tools.tune.trace_formats import read_trace


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
        ("", 0, "holds no requests"),
        (OWN, 0, "holds no requests"),
        ("\n\n", 0, "holds no requests"),
        (OWN + "1,5,3\n-1,5,3\n", 3, "arrival -1 is negative"),
        (OWN + "nan,5,3\n", 2, "arrival 'nan' is no number"),
        (OWN + "inf,5,3\n", 2, "arrival 'inf' is no number"),
        (OWN + "x,5,3\n", 2, "arrival 'x' is no number"),
        (OWN + ",5,3\n", 2, "arrival is missing"),
        (OWN + "1,0,3\n", 2, "prompt_tokens 0 is no whole number from 1"),
        (OWN + "1,2.5,3\n", 2, "prompt_tokens 2.5 is no whole number"),
        (OWN + "1,5,-3\n", 2, "new_tokens -3 is no whole number"),
        (OWN + "1,99999999999,3\n", 2, "is no whole number from 1 to 16,777,216"),
        (OWN + "1,5\n", 2, "has 2 values for the 3 columns"),
        (OWN + '1,"5,3\n', 2, "is no line of CSV"),
        ("a,b\n1,2\n", 2, "the fields a, b are of no known trace"),
        ("{}", 1, "the fields (none) are of no known trace"),
        ("[1]", 1, "is no JSON object"),
        ('{"arrival": 1', 1, "is not JSON"),
        ('{"arrival": true, "prompt_tokens": 1, "new_tokens": 1}', 1, "arrival 'True' is no number"),
        ('{"arrival": [], "prompt_tokens": 1, "new_tokens": 1}', 1, "arrival '[]' is no number"),
        ('{"arrival": 1, "prompt_tokens": 4, "new_tokens": 1, "prefix": "a"}', 1, "prefix_tokens is missing"),
        ('{"arrival": 1, "prompt_tokens": 4, "new_tokens": 1, "prefix": "a", "prefix_tokens": 5}', 1, "prefix_tokens 5 of a prompt of 4"),
        (AZURE + "yesterday,5,3\n", 2, "TIMESTAMP 'yesterday' is no time"),
        (AZURE + "2023-13-45 00:00:00,5,3\n", 2, "TIMESTAMP '2023-13-45 00:00:00' is no time"),
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


requests = st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 5000), st.integers(1, 500)), min_size=1, max_size=20)


@given(given_requests=requests)
@examples(40)
def test_written_traces_are_read_again(
    given_requests: list[tuple[float, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    names = ("arrival", "prompt_tokens", "new_tokens")
    lines = "\n".join(json.dumps(dict(zip(names, each, strict=True))) for each in given_requests)
    found = read(tmp_path_factory.mktemp("trace"), lines)
    first = min(arrival for arrival, _, _ in given_requests)
    expected = [(arrival - first, *rest) for arrival, *rest in sorted(given_requests, key=lambda each: each[0])]
    assert [(each.arrival, each.prompt_tokens, each.new_tokens) for each in found.requests] == expected


def test_prompts_start_alike_where_the_trace_says_so(tmp_path: Path) -> None:
    line = '{{"timestamp": {0}, "input_length": 700, "output_length": 1, "hash_ids": {1}}}'
    trace = read(tmp_path, "\n".join(line.format(n, ids) for n, ids in enumerate(([1, 2], [1, 3], [4, 2], [1, 2]))))
    first, other_end, other_start, same = trace.draw_prompts(100)
    assert trace.shares_prefixes
    assert [len(prompt) for prompt in trace.draw_prompts(100)] == [700] * 4 and first.max() < 100
    assert np.array_equal(first[:512], other_end[:512]) and not np.array_equal(first[512:], other_end[512:])
    assert not np.array_equal(first[:512], other_start[:512]) and np.array_equal(first, same)
    assert np.array_equal(trace.draw_prompts(100)[1], other_end)


def test_the_longest_request_decides_the_sequence_length() -> None:
    def one(arrival: float, prompt: int, *shared: SharedPart) -> TracedRequest:
        return TracedRequest(arrival, prompt, 57, shared, f"file:{prompt}")

    trace = RequestTrace.from_requests([one(0, 200), one(1, 129), one(2, 128)], "t")
    assert trace.sequence_length == 256
    trace.check_length(256)
    with pytest.raises(
        ValueError,
        match=r"file:200: 200 prompt tokens and 57 new ones do not fit --sequence-length 255; raise it to 256",
    ):
        trace.check_length(255)
