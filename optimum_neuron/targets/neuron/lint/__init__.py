# SPDX-License-Identifier: Apache-2.0
"""Checks of lowered graphs against what the Neuron compiler and device take, and their cost."""
