# SPDX-License-Identifier: Apache-2.0
"""Attention over the cache, and what all features of models stand on."""
