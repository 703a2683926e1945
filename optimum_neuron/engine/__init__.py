# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: requests come and go while the steps of one artifact run.

`scheduler.py` decides what a step holds. What it decides by is in `admission.py`, `planner.py`, `policy.py` and
`slots.py`; what it passes on in `request.py` and `step.py`. None of them imports torch.
"""
