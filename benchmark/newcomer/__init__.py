# SPDX-License-Identifier: Apache-2.0
"""How long a user waits from an empty folder to an answered HTTP request."""
