# SPDX-License-Identifier: Apache-2.0
"""Run a plan on the tensors of an artifact."""
