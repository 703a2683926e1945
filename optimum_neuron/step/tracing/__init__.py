# SPDX-License-Identifier: Apache-2.0
"""Trace equal layers once."""
