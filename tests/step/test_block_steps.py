# SPDX-License-Identifier: Apache-2.0
"""Steps whose blocks attend in place, as they are lowered but run by torch: the logits of slots, for each kind of attention."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from helpers import ARCHITECTURES, as_tensor, eager_runner, prefill_pieces, random_tokens, tiny_config
from torch import Tensor, nn

from optimum_neuron.core import PromptPiece
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.runtime.step_tensors import DecodeRows
from optimum_neuron.step.spec import GREEDY
from optimum_neuron.targets.neuron.lowering.ops import NEURON_OPS


SLOTS = {"sequence_length": 256, "context_buckets": (128, 256), "prefill_chunk_size": 32}
BLOCKS = SLOTS | {"kv_block_size": 64, "kv_cache_tokens": 512, "target": "hlo"}
PROMPT, OTHER = random_tokens(120), random_tokens(90, seed=1)


def answers(runner: GraphRunner, blocks: Sequence[Sequence[int]] = ()) -> list[Tensor]:
    """Logits of a row that decodes, first beside the chunks of another prompt and then beside its decode row."""
    runner.reset_slots()
    for slot, own in enumerate(blocks, start=1):
        runner.assign_blocks(slot, 0, own)
    logits = [prefill_pieces(runner, 1, PROMPT, [32, 32, 32, 24])]
    slots = runner.config.batch_size
    for index in range(14):
        active = torch.zeros(slots, dtype=torch.bool)
        active[1] = True
        active[2] = index >= 3
        tokens = torch.full((slots,), 3 + index, dtype=torch.int32).numpy()
        params, uniforms = torch.tensor([GREEDY] * slots).float().numpy(), torch.zeros(slots).numpy()
        chunks = [PromptPiece(2, OTHER[32 * index : 32 * (index + 1)])] if index < 3 else []
        output = runner.run_step(chunks, DecodeRows(tokens, active.numpy(), params, uniforms))
        assert output.decode_logits is not None
        logits.append(as_tensor(output.decode_logits[1]))
        logits += [as_tensor(output.decode_logits[2])] if index >= 3 else []
    return logits


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_blocks_in_place_give_the_logits_of_slots_wherever_they_are(
    name: str, tiny_models: dict[str, nn.Module]
) -> None:
    expected = answers(eager_runner(tiny_models[name], tiny_config(**SLOTS)))
    runner = eager_runner(tiny_models[name], tiny_config(**BLOCKS), ops=NEURON_OPS)
    placements = [((0, 1, 2), (3, 4)), ((7, 5, 3), (2, 6)), ((1, 7, 0), (4, 3))]
    found = [answers(runner, each) for each in placements]
    assert all((one - other).abs().max() < 1e-5 for one, other in zip(found[0], expected, strict=True))
    assert {each for each in runner.graph_calls if "128" in each and "chunked" not in each}
    for one, other in zip(found[1], found[2], strict=True):  # graphs of all blocks
        assert torch.equal(one, other)
