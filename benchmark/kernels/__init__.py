# SPDX-License-Identifier: Apache-2.0
"""The cpu target's own kernels against what torch and transformers have for the same."""
