# SPDX-License-Identifier: Apache-2.0
"""Runtime: from "advance these slots" to runs of step graphs, and the generation loop above it. Knows no target."""
