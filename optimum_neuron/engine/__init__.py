# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: requests come and go while the steps of one artifact run. README.md says which file decides what."""
