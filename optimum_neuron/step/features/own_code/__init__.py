# SPDX-License-Identifier: Apache-2.0
"""Models with attention code or states of their own."""
