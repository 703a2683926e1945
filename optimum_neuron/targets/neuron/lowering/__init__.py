# SPDX-License-Identifier: Apache-2.0
"""The way from a model's config to HLO modules."""
