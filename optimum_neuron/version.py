# SPDX-License-Identifier: Apache-2.0
"""The version of the package; manifests record it. Imports nothing."""

__version__ = "0.2.0"
