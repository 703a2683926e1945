# SPDX-License-Identifier: Apache-2.0
"""Acceptance of an artifact by the devices of a machine: `checks.py` runs the checks, `report.py` keeps what they saw."""
