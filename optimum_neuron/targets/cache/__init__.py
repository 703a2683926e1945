# SPDX-License-Identifier: Apache-2.0
"""The compile cache of all targets: what compilers made, by a digest of all that they read."""
