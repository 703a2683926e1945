# SPDX-License-Identifier: Apache-2.0
"""Fake of neuronx-distributed 0.18."""

from .trace.nxd_model.nxd_model import NxDModel as NxDModel
