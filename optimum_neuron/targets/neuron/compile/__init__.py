# SPDX-License-Identifier: Apache-2.0
"""Compilation of HLO modules to NEFFs."""
