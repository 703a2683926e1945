# SPDX-License-Identifier: Apache-2.0
"""The real package compiles here; its presence tells it from a placeholder."""
