# SPDX-License-Identifier: Apache-2.0
"""Fake of nki-library."""
