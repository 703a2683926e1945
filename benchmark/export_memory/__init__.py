# SPDX-License-Identifier: Apache-2.0
"""Memory of an export; see __main__.py."""
