# SPDX-License-Identifier: Apache-2.0
"""Artifacts in repositories of the Hub: their model cards, and how they get there."""
