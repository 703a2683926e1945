# SPDX-License-Identifier: Apache-2.0
"""Graphs as data: what each takes, returns and keeps, its HLO, and how its weights lie in files."""
