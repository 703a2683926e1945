# SPDX-License-Identifier: Apache-2.0
"""Artifacts with blocks through all that a caller can do with a model: what fits is answered as by slots, all else is refused in a sentence."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import VOCAB, artifact_runner, export_tiny, random_tokens
from invariants import check_cache
from tampering import MANIFEST, read_json, write
from transformers import GenerationConfig

from optimum_neuron import NeuronModelForCausalLM
from optimum_neuron.core import Request


SIZES = {"sequence_length": 256, "context_buckets": (256,), "prefill_chunk_size": 32}
BLOCKS = SIZES | {"kv_block_size": 64, "kv_cache_tokens": 256}  # 4 blocks for 3 rows
GREEDY = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)


@pytest.fixture(
    scope="module", params=[pytest.param("eager", marks=pytest.mark.full), pytest.param("cpu", marks=pytest.mark.slow)]
)
def folders(
    request: pytest.FixtureRequest, sharp_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder, checkpoint = tmp_path_factory.mktemp(request.param), sharp_checkpoints["llama"]
    sizes = {"slots": SIZES, "blocks": BLOCKS}
    return {name: export_tiny(checkpoint, folder / name, **sizes[name], target=request.param) for name in sizes}


@pytest.fixture(scope="module")
def slots(folders: dict[str, Path]) -> Any:
    return NeuronModelForCausalLM.from_pretrained(folders["slots"])


@pytest.fixture(scope="module")
def blocks(folders: dict[str, Path]) -> Any:
    return NeuronModelForCausalLM.from_pretrained(folders["blocks"])


def ids(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(random_tokens(count, seed)).long()[None]


def request(name: object, prompt: int | list[int], new: int, **options: Any) -> Request:
    tokens = random_tokens(prompt, seed=int(str(name))) if isinstance(prompt, int) else prompt
    return Request(request_id=str(name), prompt_token_ids=tokens, max_new_tokens=new, **options)


def check_free(model: Any) -> None:
    """All blocks can be had again: a request that takes all of them is served."""
    with model.serve() as service:
        assert len(list(service.submit(request(99, 200, 57)))) == 57
        assert service.engine.scheduler.cache.used_blocks == 0
        check_cache(service.engine.scheduler.cache)


@pytest.mark.parametrize(("prompt", "new"), [(256, 1), (255, 2), (200, 57), (64, 1), (65, 64), (64, 65), (1, 256)])
def test_what_takes_all_blocks_or_ends_with_one_is_answered_as_by_slots(
    slots: Any, blocks: Any, prompt: int, new: int
) -> None:
    options = {"max_new_tokens": new, "generation_config": GREEDY}
    expected = slots.generate(ids(prompt), **options)
    assert torch.equal(blocks.generate(ids(prompt), **options), expected)
    served = blocks.generate_batch([ids(prompt)[0].tolist()], **options)
    assert next(iter(served.values())).generated_tokens == expected[0, prompt:].tolist()


@pytest.mark.parametrize(
    ("rows", "new", "words"),
    [
        ([ids(257)], 1, "prompt of 257 tokens does not fit sequence_length=256"),
        ([ids(256)], 2, "256 tokens and 2 new tokens do not fit sequence_length=256; lower max_new_tokens to 1"),
        ([ids(129)] * 2, 1, "2 rows of 129, 129 tokens take 384 tokens of the cache in blocks of 64"),
        ([ids(60)] * 3, 66, "3 rows of 125, 125, 125 tokens take 384 tokens .* kv_cache_tokens=256"),
        ([ids(20)] * 4, 1, "4 rows .* do not fit batch_size=3"),
        ([torch.full((1, 5), VOCAB)], 3, f"{VOCAB}"),
        ([torch.full((1, 5), -7)], 3, "-7"),
    ],
)
def test_rows_that_never_fit_are_refused_before_anything_runs(
    blocks: Any, rows: list[torch.Tensor], new: int, words: str
) -> None:
    blocks.runner.reset_slots()
    calls = blocks.runner.graph_calls.copy()
    with pytest.raises(ValueError, match=words) as caught:
        blocks.generate(torch.cat(rows), max_new_tokens=new, generation_config=GREEDY)
    assert "\n" not in str(caught.value) and blocks.runner.graph_calls == calls
    assert not blocks.runner.tables.counts.any() and not blocks.runner.lengths.any()


def test_several_sequences_of_a_prompt_and_a_forward_pass_have_the_bits_of_slots(slots: Any, blocks: Any) -> None:
    options: dict[str, Any] = {"max_new_tokens": 60, "num_return_sequences": 2, "do_sample": True, "temperature": 1.5}
    found = []
    for model in (slots, blocks):
        torch.manual_seed(4)
        found.append(model.generate(ids(60), pad_token_id=0, **options))
    assert torch.equal(*found)
    assert torch.equal(*(model(ids(200), logits_to_keep=1).logits for model in (slots, blocks)))
    assert not blocks.runner.tables.counts.any()


def test_an_end_token_in_the_middle_of_a_block_frees_it(slots: Any, blocks: Any) -> None:
    prompts = torch.cat([ids(60, seed) for seed in range(2)])
    free = slots.generate(prompts, max_new_tokens=60, generation_config=GREEDY)
    end = int(free[0, 60 + 7])
    config = GenerationConfig(do_sample=False, eos_token_id=end, pad_token_id=0)
    expected = slots.generate(prompts, max_new_tokens=60, generation_config=config)
    assert torch.equal(blocks.generate(prompts, max_new_tokens=60, generation_config=config), expected)
    check_free(blocks)


def test_cancellations_under_load_lose_no_block_and_no_token(slots: Any, blocks: Any) -> None:
    """Every third request is cancelled: waiting, in its prompt, decoding, and while others give blocks back."""
    rng = np.random.default_rng(0)
    shared = random_tokens(60, seed=3).tolist()
    requests = [
        request(number, [*shared[: rng.integers(0, 60)], *random_tokens(rng.integers(1, 20), number)], 120)
        for number in range(15)
    ]

    def read(service: Any, each: Request) -> list[int]:
        stream, tokens = service.submit(each), []
        cut = int(each.request_id) % 3 == 0
        if cut and int(each.request_id) % 2:
            stream.abort()
        for token in stream:
            tokens.append(token)
            if cut and len(tokens) > 6 * int(each.request_id):
                stream.abort()
                return tokens
        return tokens

    with blocks.serve() as service, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda each: read(service, each), requests))
        assert service.engine.statistics.preemptions
    for each, tokens in zip(requests, found, strict=True):
        with slots.serve() as service:
            whole = list(service.submit(each))
        assert tokens == (whole[: len(tokens)] if int(each.request_id) % 3 == 0 else whole)
    check_free(blocks)


@pytest.mark.parametrize("value", [48, 2**40, "64"])
@pytest.mark.parametrize("name", ["kv_block_size", "kv_cache_tokens"])
def test_a_changed_cache_is_refused_in_a_sentence(folders: dict, tmp_path: Path, name: str, value: Any) -> None:
    path = Path(shutil.copytree(folders["blocks"], tmp_path / "artifact"))
    manifest = read_json(path / MANIFEST)
    manifest["config"][name] = value
    write(path, MANIFEST, json.dumps(manifest).encode())
    with pytest.raises(ValueError, match=MANIFEST) as caught:
        artifact_runner(path)
    assert "\n" not in str(caught.value)
