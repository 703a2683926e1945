# SPDX-License-Identifier: Apache-2.0
"""Quantize weights at export: how each is rounded, by what calibration, to which format."""
