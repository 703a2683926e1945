# SPDX-License-Identifier: Apache-2.0
"""Attention to the keys that an indexer selects."""
