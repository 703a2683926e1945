# SPDX-License-Identifier: Apache-2.0
"""Where tensors lie."""

shared_hbm = "shared_hbm"
