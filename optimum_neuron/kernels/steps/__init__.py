# SPDX-License-Identifier: Apache-2.0
"""Steps of plans as data: calls of kernels."""
