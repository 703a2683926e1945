# SPDX-License-Identifier: Apache-2.0
"""What of a model's own code is replaced where it runs as steps, beside attention, masks and experts."""

from __future__ import annotations

from torch import nn

from .features.own_code.layers_by_token import set_own_states
from .features.recurrence.recurrent_functions import set_recurrences
from .features.selected_keys.indexers import set_indexers
from .position_tables import set_position_tables


def set_stand_ins(model: nn.Module) -> None:
    """Has a model's code call what backends serve: functions of recurrences, layers that keep states by themselves, tables of
    positions, indexers."""
    set_recurrences(model)
    set_own_states(model)
    set_position_tables(model)
    set_indexers(model)
