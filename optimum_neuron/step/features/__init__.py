# SPDX-License-Identifier: Apache-2.0
"""Features that some models add to a step, each in a folder of its own."""
