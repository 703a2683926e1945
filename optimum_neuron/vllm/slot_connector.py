# SPDX-License-Identifier: Apache-2.0
"""Prefix reuse between slots, through vLLM's interface for KV that comes from elsewhere. A cache of blocks needs none of it.

vLLM counts blocks, each of which stands for some slot: which one a request gets is decided here, by what slots hold. A slot's
contents outlive their request. A prompt that starts like them is scheduled from where they end, and the worker copies them on
the device. The scheduler lives in one process with the only worker or in another: what it decides comes with the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.v1.request import RequestStatus

from ..core import Prefix
from ..engine.block_draft import BlockDraft
from ..engine.block_pool import MIN_REUSE
from ..engine.block_table import BlockTable
from ..engine.snapshots import SnapshotTable
from .settings import find_served
from .step_plan import StepPlan, list_advances


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
            largest, interval = config.prompt_capacity, config.state_snapshot_interval
            snapshots = SnapshotTable(config.state_places, MIN_REUSE, largest, interval)
        self._slots = BlockTable(config, snapshots=snapshots)
        self._requests: dict[str, Any] = {}  # of vLLM, those that hold a slot: they know what is computed
        self._slot_of: dict[str, int] = {}
        self._placed: dict[str, tuple[int, Prefix]] = {}  # prompts that this step may admit
        self._prompts: dict[str, tuple[int, int]] = {}  # tokens that no decode adds, and where a piece is cut
        self._plan = StepPlan()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def find_admissible(self, waiting: Sequence[Any]) -> Mapping[str, int]:
        self._follow_requests()
        return dict.fromkeys((request.request_id for request in waiting), 0) if self._slots.free_count else {}

    def draft_starts(self, starts: int) -> BlockDraft:
        """Return what the slots hold as of the last step."""
        self._follow_requests()
        return self._slots.draft_step(most_starts=starts)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens of a prompt some slot holds already."""
        self._follow_requests()
        if not self._slots.free_count:
            return 0, False  # vLLM asks before it looks for a block
        prompt = np.asarray(request.all_token_ids, dtype=np.int32)
        placed = self._slots.draft_step().place_prompt(prompt, not request.skip_reading_prefix_cache)
        assert placed is not None
        self._placed[request.request_id] = placed
        return placed[1].length, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        name, cut = request.request_id, 0
        if name in self._slot_of:  # a session has its own
            self._slots.void_row(self._slot_of[name])
        else:
            slot, prefix = self._placed[name]
            if prefix.source is not None:
                self._slots.pool.touch_block(prefix.source)
            self._slots.hold_row(slot, name)
            self._slots.give_blocks(slot, [slot])
            self._slot_of[name], cut = slot, prefix.cut
            if prefix.length:
                assert prefix.length == num_external_tokens, "vLLM takes all of a prefix that it is offered"
                self._plan.prefixes[name] = prefix
                if (stats := request.prefill_stats) is not None:  # for vLLM they came from elsewhere
                    stats.num_local_cached_tokens, stats.num_external_cached_tokens = stats.num_cached_tokens, 0
        slot = self._plan.slots[name] = self._slot_of[name]
        self._requests[name] = request
        self._prompts[name] = request.num_tokens, cut
        self._slots.write_tokens(slot, 0, np.asarray(request.all_token_ids[:num_external_tokens], dtype=np.int32))

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        plan, self._plan = self._plan, StepPlan()
        self._placed.clear()
        if self._slots.snapshots is not None:
            self._plan_snapshots(self._slots.snapshots, plan, scheduler_output)
        return plan

    def _plan_snapshots(self, snapshots: SnapshotTable, plan: StepPlan, scheduler_output: Any) -> None:
        """Plan what a step keeps. Steps run in the order in which they are made: the next one finds it."""
        texts: dict[str, np.ndarray] = {}
        for request_id, start, end in list_advances(scheduler_output):
            prompt, cut = self._prompts[request_id]
            if end <= prompt and snapshots.is_worth(start, end, prompt - end, cut):
                tokens = self._requests[request_id].all_token_ids[:end]
                texts[request_id] = np.asarray(tokens, dtype=np.int32)
        used = [prefix.snapshot for prefix in plan.prefixes.values() if prefix.snapshot is not None]
        plan.keep = snapshots.keep_texts(texts, used)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._follow_requests()
        self._release_slot(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def reset_cache(self) -> bool:
        """Forget all contents, and those to come of requests that run."""
        self._slots.forget_all()
        return True

    def _release_slot(self, name: str) -> None:
        if name in self._slot_of:
            self._slots.release_row(self._slot_of.pop(name))
            del self._requests[name], self._prompts[name]

    def _follow_requests(self) -> None:
        """Add what earlier steps computed, and take slots back from requests that vLLM preempted without notice.

        A step's own rows are not there when its copies are made.
        """
        for name, request in list(self._requests.items()):
            if request.status == RequestStatus.PREEMPTED:
                self._release_slot(name)
                continue
            slot = self._slot_of[name]
            have = self._slots.count_known(slot)
            # A token that is still being sampled is counted as computed, and not known yet.
            end = min(request.num_computed_tokens, request.num_tokens)
            if end > have >= 0:
                self._slots.write_tokens(slot, have, np.asarray(request.all_token_ids[have:end], dtype=np.int32))

    # The worker's side: the runner makes copies before it computes a step.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        raise RuntimeError("the worker copies slots itself")

    def wait_for_layer_load(self, layer_name: str) -> None:
        raise RuntimeError("the worker copies slots itself")

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        raise RuntimeError("slots are kept as they are")

    def wait_for_save(self) -> None:
        raise RuntimeError("slots are kept as they are")
