# SPDX-License-Identifier: Apache-2.0
"""Each kind of layer state names its tensors, its section and its sizes by itself; nothing else lists them."""

from __future__ import annotations

import dataclasses
import json
from itertools import chain

from helpers import examples, tiny_config
from hypothesis import given
from hypothesis import strategies as st

from optimum_neuron.artifact import manifest
from optimum_neuron.step.layer_state import LayerState
from optimum_neuron.step.model_spec import KINDS, ModelSpec
from optimum_neuron.step.state_specs import BY_TOKEN, StateSizes, byte_count, slot_state_specs, state_specs


def states_of(kind: type[LayerState]) -> st.SearchStrategy[LayerState]:
    least = {"layer_idx": 0, "index": 0}
    return st.builds(kind, **{each.name: st.integers(least.get(each.name, 1), 9) for each in dataclasses.fields(kind)})


MODELS = st.builds(
    ModelSpec,
    st.integers(1, 99),
    st.lists(st.one_of(*map(states_of, KINDS)), max_size=12).map(tuple),
    num_embeddings=st.integers(1, 99),
)


@examples(100)
@given(MODELS)
def test_a_manifest_keeps_what_layers_keep(model: ModelSpec) -> None:
    data = json.loads(json.dumps(model.to_dict()))
    manifest._MODEL("model", data)
    assert ModelSpec.from_dict(data) == model
    assert list(chain.from_iterable(map(model.states_of, KINDS))) == list(model.states)


@examples(100)
@given(MODELS)
def test_state_tensors_have_the_roles_of_their_kind_and_those_by_token_come_first(model: ModelSpec) -> None:
    config = tiny_config()
    tensors = state_specs(config, model)
    apart = slot_state_specs(config, model)
    assert tensors[len(tensors) - len(apart) :] == apart
    assert [each for each in tensors if not each.name.startswith(BY_TOKEN)] == list(apart)
    for state in model.states:
        own = {f"kv_cache.{role}_{state.layer_idx}" for role in state.roles}
        assert all(any(each.name.startswith(name) for name in own) for each in state.list_tensors(config))
    assert model.reuses_prefixes == all(state.by_token for state in model.states)
    sizes = StateSizes.measure(tensors)
    assert 0 <= sizes.per_token + sizes.per_slot <= byte_count(tensors)


def test_kinds_share_no_section_and_no_role() -> None:
    roles = [role for kind in KINDS for role in kind.roles]
    assert len(set(roles)) == len(roles) and len({kind.section for kind in KINDS}) == len(KINDS)
