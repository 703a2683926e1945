# SPDX-License-Identifier: Apache-2.0
"""What of a model's own code is replaced where it runs as steps, beside attention, masks and experts."""

from __future__ import annotations

from torch import nn

from .indexers import set_indexers
from .layers_by_token import set_own_states
from .position_tables import set_position_tables
from .recurrent_functions import set_recurrences


def set_stand_ins(model: nn.Module) -> None:
    """Has a model's code call what backends serve: functions of recurrences, layers that keep states by themselves, tables of
    positions, indexers."""
    set_recurrences(model)
    set_own_states(model)
    set_position_tables(model)
    set_indexers(model)
