# SPDX-License-Identifier: Apache-2.0
"""Where an artifact's model is from: the Hub repository of the checkpoint, and what that one's card says of its license and languages."""

from __future__ import annotations

import re
from typing import Any

from ..checkpoints.card_facts import CARD_NAME, card_facts
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.quantize.calibration import Calibration
from ..checkpoints.quantized import DEQUANTIZE


_IN_CACHE = re.compile(r"models((?:--[A-Za-z0-9._-]+){1,2})")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def origin_of(checkpoint: Checkpoint, calibration: Calibration | None = None) -> dict[str, Any]:
    """What an artifact's manifest tells of where its model is from, as far as it is known.

    `repo` and `revision` of a checkpoint in the Hub's cache; `license`, `license_name`, `license_link` and `language` of the card
    beside it; `dequantize` where codes were made plain because that was asked for; `calibration`, the sha256 of the text that weights were
    rounded on.
    """
    found: dict[str, Any] = {}
    commit = checkpoint.folder.absolute()
    match = _IN_CACHE.fullmatch(commit.parent.parent.name)
    if match is not None and commit.parent.name == "snapshots" and _COMMIT.fullmatch(commit.name):
        found |= {"repo": match[1].removeprefix("--").replace("--", "/"), "revision": commit.name}
    found |= card_facts(checkpoint.folder / CARD_NAME)
    if checkpoint.codes == DEQUANTIZE:
        found["dequantize"] = True
    if calibration is not None:
        found["calibration"] = calibration.sha256
    return found
