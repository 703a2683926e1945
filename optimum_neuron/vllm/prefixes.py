# SPDX-License-Identifier: Apache-2.0
"""Prefix reuse: slots through vLLM's interface for KV that comes from elsewhere, and snapshots of state next to blocks or slots.

The scheduler may live in another process than the only worker: what it decides comes with the step, as a `StepPlan`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.request import Request, RequestStatus

from ..artifact.artifact import Artifact
from ..config import NeuronConfig
from ..core import Prefix
from ..engine.block_pool import MIN_REUSE
from ..engine.block_table import BlockDraft, BlockTable
from ..engine.snapshots import SnapshotTable, StatePool, needed_places
from .options import GIVEN, find_served


@dataclass
class StepPlan(KVConnectorMetadata):
    """Copies and snapshots of a step, by request id.

    Attributes:
        slots: the slot of each request that starts, where the cache has slots and prompts reuse them.
        prefixes: what a request that starts need not compute, where its row or a snapshot has to be made ready for it.
        keep: the place of a snapshot that is taken after the step.
    """

    slots: dict[str, int] = field(default_factory=dict)
    prefixes: dict[str, Prefix] = field(default_factory=dict)
    keep: dict[str, int] = field(default_factory=dict)


def fit_prefix_caching(vllm_config: VllmConfig, artifact: Artifact) -> None:
    """Turn prefix caching on where the model allows it and the user did not turn it off; ValueError where the user asks in vain.

    Over blocks it is vLLM's own. That looks for whole blocks, and no prompt fills a slot: over slots the connector reuses prefixes
    of any length. Where rows keep state, prefixes end where snapshots of it are, and another scheduler would not look for them.
    """
    config, cache, wanted = artifact.config, vllm_config.cache_config, GIVEN.get().get("enable_prefix_caching")
    has_blocks, keeps_state = config.kv_block_size is not None, not artifact.model.reuses_prefixes
    scheduler = vllm_config.scheduler_config.scheduler_cls
    is_foreign = has_blocks and scheduler is not None
    refusal = "--enable-prefix-caching is not supported: this model keeps state of all tokens of a request together"
    if wanted and keeps_state and not config.state_places:
        raise ValueError(
            f"{refusal}, and the artifact keeps state_snapshots=0 of it; leave it out, or export with --state-snapshots 4"
        )
    if wanted and keeps_state and is_foreign:
        name = scheduler if isinstance(scheduler, str) else getattr(scheduler, "__qualname__", str(scheduler))
        raise ValueError(
            f"{refusal}, which --scheduler-cls {name} does not look for next to blocks; leave one of them out"
        )
    reuses = cache.enable_prefix_caching if wanted is None else wanted
    if keeps_state and (not config.state_places or is_foreign):
        reuses = False
    cache.enable_prefix_caching = reuses and has_blocks
    if reuses and not has_blocks:
        # A consumer's blocks are freed a step late, for loads that come from elsewhere at any time. Copies of slots are parts of steps.
        vllm_config.kv_transfer_config = KVTransferConfig(
            kv_connector=SlotConnector.__name__, kv_connector_module_path=__name__, kv_role="kv_producer"
        )


def _keep_states(
    table: SnapshotTable,
    prompts: Mapping[str, tuple[int, Prefix]],
    requests: Mapping[str, Request],
    scheduler_output: Any,
    used: Collection[int],
    border: int = 1,
) -> dict[str, int]:
    """Return the place of each snapshot that a step keeps, by request. Call it once for each step, in their order.

    Args:
        prompts: of each request, tokens that no decode adds, and the part of them that is reused.
        border: only a piece that ends at a multiple of it leaves a snapshot.
    """
    cached = scheduler_output.scheduled_cached_reqs
    starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    starts |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
    texts: dict[str, np.ndarray] = {}
    for name, start in starts.items():
        (length, prefix), end = prompts[name], start + scheduler_output.num_scheduled_tokens[name]
        if end <= length and end % border == 0 and table.is_worth(start, end, length - end, prefix.cut):
            texts[name] = np.asarray(requests[name].all_token_ids[:end], np.int32)
    return table.keep_texts(texts, used)


class BlockPrefixes:
    """Prefix reuse over vLLM's blocks by a model with state next to them: snapshots of that state, at borders of blocks.

    vLLM finds whole blocks of a prefix, and what it finds is cut to where a snapshot is: a hit has both, its blocks by reference
    and its state by a copy. Prompts are cut, and a snapshot is kept, at the last border within a prompt; where one parts from
    cached blocks without a snapshot; and at multiples of `state_snapshot_interval`, rounded up to whole blocks.
    """

    def __init__(self, config: NeuronConfig) -> None:
        self._size = config.block_length
        interval = config.state_snapshot_interval
        self._interval = None if interval is None else -(-interval // self._size) * self._size
        self._table = SnapshotTable(config.state_places, MIN_REUSE, self._size, self._interval)
        self._prompts: dict[
            str, tuple[int, Prefix]
        ] = {}  # tokens that no decode adds, and the part of them that is reused

    def find_start(self, request: Request, cached: int) -> int:
        """Return how many tokens a request that starts need not compute, of those that are in vLLM's blocks."""
        prefix = Prefix()
        if cached:  # after whole blocks there may be anything
            tokens = np.asarray(request.all_token_ids[: cached + 1], np.int32)
            prefix = self._table.resume_prompt(tokens, cached, has=cached + 1)
        self._prompts[request.request_id] = request.num_tokens, prefix
        return prefix.length

    def find_cut(self, request: Request, start: int) -> int:
        """Return the first place after `start` tokens of a request where a piece is to end, before the prompt does; 0: nowhere."""
        if request.status != RequestStatus.RUNNING and request.num_computed_tokens:
            self.find_start(request, 0)  # the next turn of a session: vLLM does not look for its blocks
        length, prefix = self._prompts[request.request_id]
        if start + 1 >= length:
            return 0  # a request that decodes has none
        places = [prefix.cut, (length - 1) // self._size * self._size]
        if self._interval is not None:
            places.append((start // self._interval + 1) * self._interval)
        return min((place for place in places if start < place < length), default=0)

    def forget_all(self) -> None:
        self._table.forget_all()

    def plan_step(self, scheduler_output: Any, requests: Mapping[str, Request]) -> StepPlan:
        """Return what a step restores and keeps. Call it once for each step, in their order."""
        for ended in scheduler_output.finished_req_ids - scheduler_output.num_scheduled_tokens.keys():
            self._prompts.pop(ended, None)
        starting = {new.req_id for new in scheduler_output.scheduled_new_reqs}
        starting |= scheduler_output.scheduled_cached_reqs.resumed_req_ids
        found = {name: self._prompts[name][1] for name in scheduler_output.num_scheduled_tokens if name in starting}
        plan = StepPlan(prefixes={name: prefix for name, prefix in found.items() if prefix.state is not None})
        used = needed_places(plan.prefixes.values())
        plan.keep = _keep_states(self._table, self._prompts, requests, scheduler_output, used, self._size)
        return plan


class SlotConnector(KVConnectorBase_V1, SupportsHMA):
    """Prefix reuse between slots: the scheduler's side, which is all there is.

    vLLM counts blocks, each of which stands for some slot: which one a request gets is decided here, by what slots hold.
    """

    reuses = True

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        served = find_served(vllm_config)
        assert served is not None, "the platform exports a checkpoint before an engine starts"
        config, keeps_state = served.artifact.config, not served.artifact.model.reuses_prefixes
        self._slots = BlockTable(config, state_places=config.state_places if keeps_state else None)
        self._requests: dict[str, Any] = {}  # of vLLM, those that hold a slot: they know what is computed
        self._slot_of: dict[str, int] = {}
        self._placed: dict[str, tuple[int, Prefix]] = {}  # prompts that this step may admit
        self._prompts: dict[
            str, tuple[int, Prefix]
        ] = {}  # tokens that no decode adds, and the part of them that is reused
        self._plan = StepPlan()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def find_admissible(self, waiting: Sequence[Any]) -> Mapping[str, int]:
        self._follow_requests()
        return dict.fromkeys((request.request_id for request in waiting), 0) if self._slots.free_rows else {}

    def draft_starts(self, starts: int) -> BlockDraft:
        self._follow_requests()
        return BlockDraft(self._slots, most_starts=starts)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._follow_requests()
        if not self._slots.free_rows:
            return 0, False  # vLLM asks before it looks for a block
        prompt = np.asarray(request.all_token_ids, dtype=np.int32)
        placed = BlockDraft(self._slots).place_prompt(prompt, not request.skip_reading_prefix_cache)
        assert placed is not None
        self._placed[request.request_id] = placed
        return placed[1].length, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        name, prefix = request.request_id, Prefix()
        if name in self._slot_of:  # a session has its own
            self._slots.void_row(self._slot_of[name])
        else:
            slot, prefix = self._placed[name]
            if prefix.source is not None:
                self._slots.pool.touch_block(prefix.source)
            self._slots.hold_row(slot, name)
            self._slots.give_blocks(slot, [slot])
            self._slot_of[name] = slot
            if prefix.length:
                assert prefix.length == num_external_tokens, "vLLM takes all of a prefix that it is offered"
                self._plan.prefixes[name] = prefix
                if (stats := request.prefill_stats) is not None:  # for vLLM they came from elsewhere
                    stats.num_local_cached_tokens, stats.num_external_cached_tokens = stats.num_cached_tokens, 0
        slot = self._plan.slots[name] = self._slot_of[name]
        self._requests[name] = request
        self._prompts[name] = request.num_tokens, prefix
        self._slots.write_tokens(slot, 0, np.asarray(request.all_token_ids[:num_external_tokens], dtype=np.int32))

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        plan, self._plan = self._plan, StepPlan()
        self._placed.clear()
        if isinstance(self._slots.pool, StatePool):
            table, used = self._slots.pool.snapshots, needed_places(plan.prefixes.values())
            plan.keep = _keep_states(table, self._prompts, self._requests, scheduler_output, used)
        return plan

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._follow_requests()
        self._release_slot(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def reset_cache(self) -> bool:
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
            have = self._slots.known[slot]
            # A token that is still being sampled is counted as computed, and not known yet.
            end = min(request.num_computed_tokens, request.num_tokens)
            if end > have >= 0:
                self._slots.write_tokens(slot, have, np.asarray(request.all_token_ids[have:end], dtype=np.int32))

    def _refuse_work(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("the runner copies slots itself, before it computes a step")

    # The worker's side.
    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _refuse_work
