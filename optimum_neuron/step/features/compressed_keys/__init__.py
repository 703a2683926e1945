# SPDX-License-Identifier: Apache-2.0
"""Attention to keys that are compressed in groups."""
