# SPDX-License-Identifier: Apache-2.0
"""Weights of few bits: how they are stored, and the modules that compute with them."""
