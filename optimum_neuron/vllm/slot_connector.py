# SPDX-License-Identifier: Apache-2.0
"""Prefix reuse between slots, told to vLLM's scheduler through its interface for KV that comes from elsewhere. Blocks need none of it.

A slot's rows outlive their request. A prompt that starts like them is scheduled from where they end, and the worker
copies them on the device. The scheduler lives in one process with the only worker or in another: what it decides goes
along with the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from ..engine.slots import MIN_REUSE, SlotTable
from ..engine.snapshots import Resumption, SnapshotTable
from ..runtime.step_rows import Prefix
from .settings import chunk_tokens, find_served
from .step_plan import StepPlan, advances


class SlotConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's side, which is all there is."""

    reuses = True

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        served = find_served(vllm_config)
        assert served is not None, "the platform exports a checkpoint before an engine starts"
        config = served.artifact.config
        snapshots = None
        if not served.artifact.model.reuses_prefixes:
            largest, interval = chunk_tokens(config), config.state_snapshot_interval
            snapshots = SnapshotTable(config.snapshot_places, MIN_REUSE, largest, interval)
        self._slots = SlotTable(config.batch_size, config.sequence_length, snapshots=snapshots)
        self._holders: dict[int, Any] = {}  # slot to vLLM's request, which tells what is computed
        self._slot_of: dict[str, int] = {}
        self._matched: dict[str, tuple[int, Resumption]] = {}  # source slots of prompts that this step may admit
        self._prompts: dict[str, tuple[int, int]] = {}  # how many tokens are no decode's, and where a chunk is cut
        self._plan = StepPlan()
        self._pool: Any | None = None

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def admissible(self, waiting: Sequence[Any]) -> Mapping[str, int]:
        return (
            dict.fromkeys((request.request_id for request in waiting), 0)
            if self._free_blocks().num_free_blocks
            else {}
        )

    def table(self, starts: int) -> SlotTable:
        """What the slots hold as of the step before."""
        self._read_contents()
        free = {block.block_id - 1 for block in self._free_blocks().get_all_free_blocks()[:starts]}
        for slot in set(self._slots.free_slots) - free:
            self._slots.hold(slot, str(slot))
        for slot in free - set(self._slots.free_slots):
            self._slots.release(slot)
        return self._slots

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens of a prompt are in some slot already."""
        source, common, found = 0, 0, Resumption(0)
        if not request.skip_reading_prefix_cache:
            self._read_contents()
            prompt = np.asarray(request.all_token_ids, dtype=np.int32)
            source, common = self._slots.match(prompt)
            found = self._slots.resume(prompt, source, common)  # the last one's logits choose the next token
            self._matched[request.request_id] = source, found
        self._offer_slot(source, common if found.length else 0)
        return found.length, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        slot = blocks.get_block_ids()[0][0] - 1
        source, found = self._matched.get(request.request_id, (0, Resumption(0)))
        if num_external_tokens > 0:
            self._plan.reuse[request.request_id] = Prefix(source, num_external_tokens, found.snapshot)
            if (stats := request.prefill_stats) is not None:  # for vLLM they came from elsewhere
                stats.num_local_cached_tokens, stats.num_external_cached_tokens = stats.num_cached_tokens, 0
        self._forget(request.request_id)
        if slot in self._holders:  # a preempted request, which vLLM does not tell of
            self._forget(self._holders[slot].request_id)
        self._holders[slot] = request
        self._slot_of[request.request_id] = slot
        self._prompts[request.request_id] = request.num_tokens, found.parts_at
        self._slots.write(slot, 0, np.asarray(request.all_token_ids[:num_external_tokens], dtype=np.int32))

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        plan, self._plan = self._plan, StepPlan()
        self._matched.clear()
        if self._slots.snapshots is not None:
            self._plan_snapshots(self._slots.snapshots, plan, scheduler_output)
        return plan

    def _plan_snapshots(self, snapshots: SnapshotTable, plan: StepPlan, scheduler_output: Any) -> None:
        """Steps run in the order in which they are made: the next one finds what this one keeps."""
        texts: dict[str, np.ndarray] = {}
        for request_id, start, end in advances(scheduler_output):
            prompt, parts_at = self._prompts[request_id]
            if end <= prompt and snapshots.is_worth(start, end, prompt - end, parts_at):
                tokens = self._holders[self._slot_of[request_id]].all_token_ids[:end]
                texts[request_id] = np.asarray(tokens, dtype=np.int32)
        used = [prefix.snapshot for prefix in plan.reuse.values() if prefix.snapshot is not None]
        plan.keep = snapshots.keep(texts, used)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._read_contents()
        self._forget(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def reset_cache(self) -> bool:
        """Forgets all contents; vLLM sees to it that no request is running."""
        self._slots.clear()
        return True

    def _offer_slot(self, source: int, common: int) -> None:
        """Puts the free slot whose contents are missed least where vLLM takes the next one from.

        vLLM itself takes the slot that was freed last, though its rows are the likeliest to be asked for again. A prefix
        that ends with its slot's contents is continued in place; otherwise the slot that was freed first is given up.
        """
        queue = self._free_blocks()
        free = queue.get_all_free_blocks()
        if len(free) > 1:
            ends_there = common > 0 and common == len(self._slots.contents(source))
            in_place = [block for block in free if ends_there and block.block_id == source + 1]
            block = in_place[0] if in_place else free[-1]
            queue.remove(block)
            queue.prepend_n([block])

    def _free_blocks(self) -> Any:
        assert self._pool is not None, "vLLM binds its blocks before it schedules"
        return self._pool.free_block_queue

    def _forget(self, request_id: str) -> None:
        slot = self._slot_of.pop(request_id, None)
        if slot is not None:
            del self._holders[slot], self._prompts[request_id]

    def _read_contents(self) -> None:
        """Adds what earlier steps computed. A step's own rows are not there when its copies are made."""
        for slot, request in self._holders.items():
            have = len(self._slots.contents(slot))
            # A token that is still being sampled is counted as computed, and not known yet.
            end = min(request.num_computed_tokens, request.num_tokens)
            if end > have:
                self._slots.write(slot, have, np.asarray(request.all_token_ids[have:end], dtype=np.int32))

    # The worker's side: copies are made by the runner, before it computes a step.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise RuntimeError("the worker copies slots itself")

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise RuntimeError("the worker copies slots itself")

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        raise RuntimeError("slots are kept as they are")

    def wait_for_save(self) -> None:
        raise RuntimeError("slots are kept as they are")
