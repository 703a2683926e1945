# SPDX-License-Identifier: Apache-2.0
"""The artifact folder: written whole, verified, mapped. It knows no target."""
