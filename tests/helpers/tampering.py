# SPDX-License-Identifier: Apache-2.0
"""Artifacts changed in every place that a reader believes; tampered.py tells what becomes of each."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple


MANIFEST, WEIGHTS = "neuron_config.json", "weights/model.safetensors"
HUGE = 2**40
WRONG: tuple[Any, ...] = (None, True, "", "4; abort()", -1, 0, 1.5, HUGE, 10**400, [], {}, [[]], {"x": 1})
# Sizes in config.json on which weights or graphs depend.
CONFIG_SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
)  # fmt: skip


class Change(NamedTuple):
    """A name that tells the place and the value, and what is done to an artifact's folder."""

    name: str
    apply: Callable[[Path], object]


def changes(artifact: Path) -> list[Change]:
    """All changes of an artifact, in a fixed order."""
    manifest = read_json(artifact / MANIFEST)
    config = read_json(artifact / "config.json")
    descriptions = [name for name in manifest["files"] if name.startswith("graphs/") and name.endswith(".json")]
    return [
        *_values(MANIFEST, manifest),
        *_texts(MANIFEST, json.dumps(manifest)),
        *_files(manifest),
        *_headers(artifact),
        *_values("config.json", config, [(size,) for size in CONFIG_SIZES if size in config]),
        *_texts("config.json", json.dumps(config)),
        *(change for name in descriptions[:2] for change in _values(name, read_json(artifact / name))),
    ]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: Path, name: str, data: bytes, *, vouched: bool = True) -> None:
    """Replaces a file's contents, and where `vouched` its size and digest in the manifest."""
    (path / name).write_bytes(data)
    if vouched and name != MANIFEST:
        manifest = read_json(path / MANIFEST)
        manifest["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
        (path / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")


def with_header(text: bytes, tail: bytes, claimed: int | None = None) -> bytes:
    """A file in safetensors' form, whose header is as long as `claimed`, or as it is."""
    return (len(text) if claimed is None else claimed).to_bytes(8, "little") + text + tail


def _values(
    name: str, document: Any, places: Iterable[tuple[str | int, ...]] | None = None, tail: bytes | None = None
) -> Iterator[Change]:
    """Every place of a JSON file, or of the header before a `tail`, with values of every kind."""

    def edit(path: Path, **how: Any) -> None:
        text = json.dumps(_replaced(document, **how)).encode()
        write(path, name, text if tail is None else with_header(text, tail))

    for place in _places(document) if places is None else places:
        own, label = _at(document, place), ".".join(map(str, place))
        for value in (*WRONG, *_near(own)):
            if json.dumps(value) != json.dumps(own):
                yield Change(f"{name} {label} = {json.dumps(value)[:40]}", partial(edit, place=place, value=value))
        if isinstance(place[-1], str):
            yield Change(f"{name} without {label}", partial(edit, place=place, value=None, remove=True))


def _places(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Paths to all members; of long lists and groups of alike members the first two."""
    if place:
        yield place
    members = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    alike = isinstance(value, list) or (len(members) > 2 and isinstance(members[0][1], dict | list))
    for key, inner in members[:2] if alike else members:
        yield from _places(inner, (*place, key))


def _near(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value, int(value)]
    if isinstance(value, int):
        return [value + 1, value * 2, str(value), [value], float(value)]
    if isinstance(value, str):
        return [value + "x", value[:-1], [value], "../" + value, "bfloat16", "cpu", "eager"]
    if isinstance(value, list):
        return [value + value[:1], value[1:], value[::-1], {"0": value}]
    return [dict(list(value.items())[1:]), [value]] if isinstance(value, dict) else []


def _at(value: Any, place: tuple[str | int, ...]) -> Any:
    for key in place:
        value = value[key]
    return value


def _replaced(document: Any, place: tuple[str | int, ...], value: Any, *, remove: bool = False) -> Any:
    changed = copy.deepcopy(document)
    inner = _at(changed, place[:-1])
    if remove:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return changed


def _texts(name: str, text: str) -> Iterator[Change]:
    """What is no proper JSON object."""
    texts = {
        "cut": text[: len(text) // 2], "empty": "", "a list": f"[{text}]", "nested": "[" * 100_000, "no text": "\udcff",
        "a name twice": text[:-1] + ', "target": "eager", "target": "cpu"}', "NaN": text[:-1] + ', "x": NaN}',
        "a long number": text[:-1] + ', "x": ' + "3" * 5000 + "}",
    }  # fmt: skip
    for label, changed in texts.items():
        yield Change(f"{name}: {label}", partial(write, name=name, data=changed.encode(errors="surrogateescape")))


def _files(manifest: dict[str, Any]) -> Iterator[Change]:
    """Files cut, lengthened, damaged, gone, renamed, swapped, and linked to others; unvouched, and where told vouched."""
    names = [name for name in manifest["files"] if "/" in name or name in ("config.json", "generation_config.json")]
    code = [name for name in names if name.startswith("graphs/")]
    damages: dict[str, Callable[[bytes], bytes]] = {
        "cut in half": lambda data: data[: len(data) // 2],
        "empty": lambda data: b"",
        "cut by a byte": lambda data: data[:-1],
        "longer": lambda data: data + b"\0" * 4096,
        "zeros": lambda data: bytes(len(data)),
        "flipped at the start": lambda data: flipped(data, 1),
        "flipped in the middle": lambda data: flipped(data, len(data) // 2),
        "flipped at the end": lambda data: flipped(data, len(data) - 20),
    }
    moves: dict[str, Callable[[Path, str], object]] = {
        "gone": lambda path, name: (path / name).unlink(),
        "gone, unlisted": partial(_unlist, remove=True),
        "unlisted": _unlist,
        "renamed": lambda path, name: (path / name).rename(path / (name + ".x")),
        "linked elsewhere": _link,
        "linked to itself": lambda path, name: ((path / name).unlink(), (path / name).symlink_to(path / name)),
        "a folder": lambda path, name: ((path / name).unlink(), (path / name).mkdir()),
        "a pipe": lambda path, name: ((path / name).unlink(), os.mkfifo(path / name)),
    }

    def damage(path: Path, name: str, how: Callable[[bytes], bytes], vouched: bool, other: str | None = None) -> None:
        write(path, name, how((path / (other or name)).read_bytes()), vouched=vouched)

    for name in names:
        for label, how in damages.items():
            for vouched in (False, True) if name in code or not label.startswith("flipped") else (False,):
                change = partial(damage, name=name, how=how, vouched=vouched)
                yield Change(f"{name} {label}{', vouched' * vouched}", change)
        for label, move in moves.items():
            yield Change(f"{name} {label}", partial(move, name=name))
        for vouched, other in itertools.product(
            (False, True), [each for each in code[:2] if name in code and each != name]
        ):
            change = partial(damage, name=name, how=bytes, vouched=vouched, other=other)
            yield Change(f"{name} is {other}{', vouched' * vouched}", change)
    for folder in ("graphs", "weights") if code else ("weights",):
        yield Change(f"{folder} linked elsewhere", partial(_link, name=folder))
    for name in ("graphs/kernels.so", "graphs/foreign.json", "weights/tp0.safetensors"):
        if name not in names:
            yield Change(f"{name} added", partial(_add, name=name))


def flipped(data: bytes, offset: int = -1) -> bytes:
    changed = bytearray(data)
    changed[offset] ^= 16
    return bytes(changed)


def _unlist(path: Path, name: str, *, remove: bool = False) -> None:
    manifest = read_json(path / MANIFEST)
    del manifest["files"][name]
    (path / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    if remove:
        (path / name).unlink()


def _link(path: Path, name: str) -> None:
    moved = path.with_name(f"{path.name}-elsewhere-{Path(name).name}")
    shutil.move(path / name, moved)
    (path / name).symlink_to(moved)


def _add(path: Path, name: str) -> None:
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_bytes(b"\x7fELF" * 99)


def _headers(artifact: Path) -> Iterator[Change]:
    """Headers of the weights that contradict the file, itself, or the model; vouched for by the manifest."""
    data = (artifact / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    name, *others = header
    other = next(each for each in others if header[each]["shape"] != header[name]["shape"])
    start, stop = header[name]["data_offsets"]
    places = [(name, *place) for place in [(), *_places(header[name])]]
    yield from _values(WEIGHTS, header, places, body)
    for label, text, tail in (
        *((f"offsets {each}", header | {name: header[name] | {"data_offsets": each}}, body)
          for each in ([-8, stop - start - 8], [HUGE, HUGE + stop - start], [stop, start])),
        ("overlapping", header | {name: header[other]}, body),
        ("flattened", header | {name: header[name] | {"shape": [(stop - start) // 4]}}, body),
        ("names swapped", header | {name: header[other], other: header[name]}, body),
        ("a tensor more", header | {"model.more": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}, body),
        ("metadata of another type", header | {"__metadata__": {"x": 3}}, body),
        ("trailing bytes", header, body + b"\0" * 64),
        ("bytes missing", header, body[:-64]),
    ):  # fmt: skip
        changed = with_header(json.dumps(text).encode(), tail)
        yield Change(f"{WEIGHTS} header: {label}", partial(write, name=WEIGHTS, data=changed))
    for claimed in (0, 2**63, HUGE, length + 1, length - 1):
        changed = with_header(data[8 : 8 + length], body, claimed)
        yield Change(f"{WEIGHTS} header claims {claimed}", partial(write, name=WEIGHTS, data=changed))
