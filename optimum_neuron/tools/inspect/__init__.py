# SPDX-License-Identifier: Apache-2.0
"""What an artifact is, as plain data, as tables and as a page. Nothing of it is loaded or run."""
