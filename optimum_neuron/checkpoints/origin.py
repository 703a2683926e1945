# SPDX-License-Identifier: Apache-2.0
"""The origin of a model: its repository on the Hub, and the license and languages of its card. Imports no torch."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from ..errors import first_line


logger = logging.getLogger(__name__)

CARD_NAME = "README.md"
LICENSE = r"[a-z0-9][a-z0-9.+-]{0,63}"
LICENSE_NAME = r"[ -~]{1,100}"
LINK = r"https://[!-~]{1,500}"
LANGUAGE = r"[A-Za-z]{2,8}(?:-[A-Za-z0-9]{1,8}){0,3}"
_IN_CACHE = re.compile(r"models((?:--[A-Za-z0-9._-]+){1,2})")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LARGEST_CARD = 1 << 20
_MOST_LANGUAGES = 200


def card_facts(path: Path) -> dict[str, Any]:
    """Return `license`, `license_name`, `license_link` and `language` of a card, each only in the Hub's form."""
    if not path.is_file() or path.stat().st_size > _LARGEST_CARD:
        return {}
    from huggingface_hub import metadata_load

    try:
        data = metadata_load(path) or {}
    except Exception as error:  # a YAML parser reads a text of a stranger
        logger.warning("%s: its metadata cannot be read, and no license is taken from it: %s", path, first_line(error))
        return {}
    found = {
        name: data[name]
        for name, pattern in (("license", LICENSE), ("license_name", LICENSE_NAME), ("license_link", LINK))
        if isinstance(data.get(name), str) and re.fullmatch(pattern, data[name])
    }
    languages: Any = data.get("language")
    languages = [languages] if isinstance(languages, str) else languages
    is_list = isinstance(languages, list) and 0 < len(languages) <= _MOST_LANGUAGES
    if is_list and all(isinstance(each, str) and re.fullmatch(LANGUAGE, each) for each in languages):
        found["language"] = languages
    if "license" in data and "license" not in found:
        logger.warning("%s: its license is none that the Hub knows the form of, and is not taken over", path)
    return found


def read_origin(folder: Path, *, dequantized: bool = False, calibration: str | None = None) -> dict[str, Any]:
    """Return for a manifest `repo` and `revision` of a checkpoint in the Hub's cache, the facts of its card, and the other two arguments.

    `calibration` is the sha256 of the text that weights are rounded on.
    """
    found: dict[str, Any] = {}
    commit = folder.absolute()
    match = _IN_CACHE.fullmatch(commit.parents[1].name) if len(commit.parts) > 2 else None
    if match is not None and _COMMIT.fullmatch(commit.name):
        found |= {"repo": match[1].removeprefix("--").replace("--", "/"), "revision": commit.name}
    own = {"dequantize": dequantized or None, "calibration": calibration}
    return found | card_facts(folder / CARD_NAME) | {name: value for name, value in own.items() if value is not None}
