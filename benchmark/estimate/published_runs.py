# SPDX-License-Identifier: Apache-2.0
"""Step times that others measured on Neuron devices: what estimates are fitted to, and tested on. Imports no torch.

All in bfloat16. Left out of the same pages: runs with weights in int8, which no graph of this project has; runs with
speculation; times to the first token of several prompts at once, since no page tells whether they shared a graph; mixtures
of experts, whose graphs read other experts than this project's; and models that a page does not name.

Which runs are held out of the fit was settled before any error was computed: fitted are the oldest family of AWS' tables,
Llama-2, and what optimum-neuron published; all other models and software are held out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One measured configuration of fixed-shape graphs.

    Attributes:
        context_length: columns of the cache that the decode step reads: the graph of the median token.
        decode_ms: a token generation step of all `batch_size` rows.
        prompt_tokens: that a graph which takes in a prompt computes, padding included; None where none was published.
        first_token_ms: from a request of one prompt to its first token, by `chunks` runs of that graph, with what the host does.
        prompt_context: columns that the prompt's tokens attend to.
        held_out: whether the fit never saw it.
    """

    model: str
    target: str
    tensor_parallel_size: int
    batch_size: int
    context_length: int
    decode_ms: float
    prompt_tokens: int | None = None
    first_token_ms: float | None = None
    prompt_context: int | None = None
    chunks: int = 1
    held_out: bool
    source: str


def _llama(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int, kind: str = "llama"
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": vocabulary,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
    }


# Of their configs, what decides sizes.
MODELS = {
    "Llama-2-7B": _llama(4096, 11_008, 32, 32, 32, 32_000),
    "Llama-2-13B": _llama(5120, 13_824, 40, 40, 40, 32_000),
    "Llama-2-70B": _llama(8192, 28_672, 80, 64, 8, 32_000),
    "CodeLlama-13B": _llama(5120, 13_824, 40, 40, 40, 32_016),
    "Mistral-7B": _llama(4096, 14_336, 32, 32, 8, 32_000, "mistral") | {"sliding_window": None},
    "Llama-3-70B": _llama(8192, 28_672, 80, 64, 8, 128_256),
    "Llama-3.1-8B": _llama(4096, 14_336, 32, 32, 8, 128_256),
    "Llama-3.1-405B": _llama(16_384, 53_248, 126, 128, 8, 128_256),
    "Qwen3-32B": _llama(5120, 25_600, 64, 64, 8, 151_936, "qwen3"),
}

_TABLES = "aws-neuron-sdk about-neuron/benchmarks/{}/{{latency,throughput}}_data_decoder.csv, transformers-neuronx of SDK 2.18"
_TUTORIALS = "aws-neuron-sdk libraries/nxd-inference/tutorials/"
_OPTIMUM = "optimum-neuron benchmark/vllm/"

_Row = tuple[str, int, int, float, int | None, float | None]
# Model, rows, columns, ms per step; tokens of a prompt and ms to the first token. The graph of the median token is that of the
# power of two, up to the sequence length, which holds the prompt and half of the answer.
# fmt: off
_INF2_48XLARGE: tuple[_Row, ...] = (
    ("Llama-3-70B", 1,  4096, 34.67,  2048,   745.5),
    ("Llama-3-70B", 1,  2048, 33.81,  1024,   312.9),
    ("Llama-3-70B", 1,  2048, 33.14,  1024,   310.2),
    ("Llama-3-70B", 1,  1024, 32.47,   128,      80),
    ("Llama-3-70B", 1,   512, 32.48,   256,   99.37),
    ("Llama-3-70B", 1,   256,  32.2,   128,   77.81),
    ("Llama-2-7B", 1,  4096,  6.47,   128,   27.64),
    ("Llama-2-7B", 1,  8192,  7.34,   128,   29.21),
    ("Llama-2-13B", 1,  4096, 9.166,   128,   25.85),
    ("Llama-2-13B", 1,  8192, 10.17,  4096,   333.8),
    ("Llama-2-13B", 1, 16384,  13.5,  8192,   994.2),
    ("Llama-2-70B", 1,   256,  32.9,   128,    76.6),
    ("Llama-2-70B", 1,   512, 33.13,   256,   96.44),
    ("Llama-2-70B", 1,  1024, 33.15,   128,   76.33),
    ("Llama-2-70B", 1,  2048, 33.73,  1024,     277),
    ("Llama-2-70B", 1,  2048, 34.82,  1024,     276),
    ("Llama-2-70B", 1,  4096,  34.9,  2048,   810.4),
    ("Mistral-7B", 1,  4096, 6.862,   128,   27.34),
    ("Mistral-7B", 1,  8192, 7.866,  4096,     558),
    ("Mistral-7B", 1, 16384, 10.33,  8192,   539.6),
    ("CodeLlama-13B", 1,  4096, 9.124,   128,   27.02),
    ("CodeLlama-13B", 1,  8192, 10.15,  4096,   338.7),
    ("CodeLlama-13B", 1, 16384, 13.44,  8192,   989.5),
    ("Llama-2-7B", 8,  4096, 12.11,  None,    None),
    ("Llama-2-7B", 8,  8192, 16.39,  None,    None),
    ("Llama-2-13B", 8,  4096,  14.9,  None,    None),
    ("Llama-2-13B", 8,  8192, 20.99,  None,    None),
    ("Llama-2-13B", 4, 16384, 21.71,  None,    None),
    ("Mistral-7B", 8,  4096, 11.64,  None,    None),
    ("Mistral-7B", 8,  8192, 16.55,  None,    None),
    ("Mistral-7B", 8, 16384, 18.01,  None,    None),
    ("CodeLlama-13B", 8,  4096, 15.87,  None,    None),
    ("CodeLlama-13B", 8,  8192, 22.27,  None,    None),
    ("CodeLlama-13B", 4, 16384, 21.67,  None,    None),
)
_TRN1_32XLARGE: tuple[_Row, ...] = (
    ("Llama-3-70B", 1,  4096,  26.2,  2048,     547),
    ("Llama-3-70B", 1,  1024, 24.48,   128,    53.2),
    ("Llama-3-70B", 1,   256, 26.48,   128,   52.53),
    ("Llama-2-7B", 1,  8192,   6.7,   128,   13.32),
    ("Llama-2-13B", 1,  8192, 9.844,  4096,   864.1),
    ("Llama-2-13B", 1, 16384, 13.41,  8192,    2368),
    ("Llama-2-70B", 1,   256, 25.18,   128,   53.91),
    ("Llama-2-70B", 1,   512, 25.27,   256,   81.88),
    ("Llama-2-70B", 1,  1024, 25.45,   128,   57.75),
    ("Llama-2-70B", 1,  2048, 26.04,  1024,   232.5),
    ("Llama-2-70B", 1,  2048, 26.62,  1024,   236.8),
    ("Llama-2-70B", 1,  4096, 26.85,  2048,     691),
    ("Mistral-7B", 1, 16384, 9.892,  8192,    1323),
    ("CodeLlama-13B", 1,  8192, 9.865,  4096,   868.6),
    ("CodeLlama-13B", 1, 16384,  13.4,  8192,    2373),
    ("Llama-3-70B", 4,  4096, 32.33,  None,    None),
    ("Llama-3-70B", 4,  1024, 28.38,  None,    None),
    ("Llama-3-70B", 4,   256, 28.08,  None,    None),
    ("Llama-2-7B", 8,  8192,  10.1,  None,    None),
    ("Llama-2-13B", 8,  8192, 19.86,  None,    None),
    ("Llama-2-13B", 4, 16384, 21.09,  None,    None),
    ("Llama-2-70B", 4,   256, 26.72,  None,    None),
    ("Llama-2-70B", 4,   512, 26.91,  None,    None),
    ("Llama-2-70B", 4,  1024, 27.21,  None,    None),
    ("Llama-2-70B", 4,  2048, 28.55,  None,    None),
    ("Llama-2-70B", 4,  2048, 31.67,  None,    None),
    ("Llama-2-70B", 4,  4096, 31.79,  None,    None),
    ("Mistral-7B", 8, 16384, 15.44,  None,    None),
    ("CodeLlama-13B", 8,  8192, 19.92,  None,    None),
    ("CodeLlama-13B", 4, 16384,  21.1,  None,    None),
)
# fmt: on


def _rows(target: str, cores: int, rows: tuple[_Row, ...]) -> tuple[PublishedRun, ...]:
    return tuple(
        PublishedRun(
            model=model,
            target=target,
            tensor_parallel_size=cores,
            batch_size=batch,
            context_length=context,
            decode_ms=decode,
            prompt_tokens=tokens,
            first_token_ms=first,
            held_out=not model.startswith("Llama-2"),
            source=_TABLES.format(target),
        )
        for model, batch, context, decode, tokens, first in rows
    )


# Pull request 1086, configuration D: the two chunks of a 1500-token prompt.
LLAMA_8B_INF2 = PublishedRun(
    model="Llama-3.1-8B",
    target="inf2",
    tensor_parallel_size=8,
    batch_size=32,
    context_length=4096,
    decode_ms=24.6,
    prompt_tokens=1024,
    first_token_ms=296.0,
    prompt_context=4096,
    chunks=2,
    held_out=False,
    source=_OPTIMUM + "chunked-prefill, configuration D",
)


def _trn2(
    model: str, cores: int, batch: int, context: int, decode_ms: float, source: str, **more: Any
) -> PublishedRun:
    return PublishedRun(
        model=model,
        target="trn2",
        tensor_parallel_size=cores,
        batch_size=batch,
        context_length=context,
        decode_ms=decode_ms,
        held_out=not source.startswith(_OPTIMUM),
        source=source,
        **more,
    )


RUNS = (
    *_rows("inf2", 24, _INF2_48XLARGE),
    *_rows("trn1", 32, _TRN1_32XLARGE),
    LLAMA_8B_INF2,
    PublishedRun(
        model="Llama-3.1-8B",
        target="inf2",
        tensor_parallel_size=8,
        batch_size=32,
        context_length=4096,
        decode_ms=24.51,
        prompt_tokens=4096,
        first_token_ms=321.9,
        held_out=False,
        source=_OPTIMUM + "chunked-prefill, configuration A: the whole prompt in a graph of 4096",
    ),
    _trn2("Llama-3.1-8B", 4, 32, 4096, 22.1, _OPTIMUM + "single-instance"),
    # Its sequence length is not told: 4096 is the default, and at 2 rows the cache is 3% of what a step reads.
    _trn2("Qwen3-32B", 4, 2, 4096, 32.1, _OPTIMUM + "single-instance"),
    # Llama-3.3-70B, of the same sizes.
    _trn2(
        "Llama-3-70B",
        64,
        1,
        12_800,
        19.66,
        _TUTORIALS + "trn2-llama3.3-70b-tutorial.rst, with NKI kernels",
        prompt_tokens=12_288,
        first_token_ms=814.2,
    ),
    _trn2(
        "Llama-3.1-405B",
        64,
        1,
        12_800,
        37.93,
        _TUTORIALS + "trn2-llama3.1-405b-speculative-tutorial.rst, with NKI kernels",
        prompt_tokens=12_288,
        first_token_ms=2442.0,
    ),
    # The slowest of ten requests: 6.04 s for 558 tokens.
    _trn2(
        "Qwen3-32B",
        64,
        1,
        1024,
        10.76,
        _TUTORIALS + "sd-inference-tutorial.rst",
        prompt_tokens=128,
        first_token_ms=48.3,
    ),
    _trn2(
        "Llama-3.1-8B",
        8,
        2,
        2048,
        10.52,
        "aws-neuron-sdk vllm-neuron/docs/tutorials/tutorial-eagle3-speculative-decoding-llama-3-1.md, the baseline",
    ),
)
