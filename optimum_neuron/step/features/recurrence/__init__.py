# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers: a state per slot, updated by a scan over tokens."""
