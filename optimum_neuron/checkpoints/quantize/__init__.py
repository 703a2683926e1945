# SPDX-License-Identifier: Apache-2.0
"""Rounding of weights at export: which ones, to which codes, by what calibration."""
