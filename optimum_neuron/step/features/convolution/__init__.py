# SPDX-License-Identifier: Apache-2.0
"""Causal convolutions: the last inputs of each slot."""
