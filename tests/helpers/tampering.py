# SPDX-License-Identifier: Apache-2.0
"""Artifacts changed in every place that a reader believes; tampered.py tells what becomes of each."""

from __future__ import annotations

import copy
import hashlib
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
    return [
        *_values(MANIFEST, manifest),
        *_manifest_texts(manifest),
        *_files(manifest),
        *_headers(artifact),
        *_model_configs(artifact),
        *_descriptions(artifact, manifest),
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


def _values(name: str, document: Any, places: Iterable[tuple[str | int, ...]] | None = None) -> Iterator[Change]:
    """Every place of a JSON file, with values of every kind; the text is made for those that are tried."""

    def edit(path: Path, **how: Any) -> None:
        write(path, name, json.dumps(_replaced(document, **how)).encode())

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


def _manifest_texts(manifest: dict[str, Any]) -> Iterator[Change]:
    """What is no proper JSON object, and what several fields say together."""
    text = json.dumps(manifest)
    texts = {
        "cut": text[: len(text) // 2],
        "empty": "",
        "a list": f"[{text}]",
        "nested": "[" * 100_000,
        "a name twice": text[:-1] + ', "target": "eager"}',
        "NaN": text.replace('"task"', '"x": NaN, "task"'),
        "a long number": text.replace('"batch_size": 3', '"batch_size": ' + "3" * 5000),
        "no text": "\udcff",
    }
    for label, changed in texts.items():
        data = changed.encode("utf-8", errors="surrogateescape")
        yield Change(f"{MANIFEST}: {label}", lambda path, data=data: write(path, MANIFEST, data))
    ties = {"an alias of an alias": {"model.a": "model.b", "model.b": "model.c"}, "itself": {"model.a": "model.a"}}
    ties["a stored one"] = {"model.lm_head.weight": "model.model.embed_tokens.weight"}
    for label, tied in ties.items():
        data = json.dumps(manifest | {"tied_weights": tied}).encode()
        yield Change(f"{MANIFEST}: tied to {label}", lambda path, data=data: write(path, MANIFEST, data))
    for label, sizes in {
        "batch": {"batch_size": 4},
        "length": {"sequence_length": 128, "context_buckets": [128]},
        "type": {"dtype": "bfloat16"},
        "memory": {"sequence_length": 2**30, "context_buckets": [2**30]},
    }.items():
        data = json.dumps(_with_graphs(manifest, sizes)).encode()
        yield Change(f"{MANIFEST}: another {label}, graphs told", lambda path, data=data: write(path, MANIFEST, data))
    for size in ("kv_heads", "key_dim", "value_dim", "layer_idx"):
        for factor in (2, 3, HUGE // 16):
            model = copy.deepcopy(manifest["model"])
            for layer in model["layers"]:
                layer[size] = layer[size] * factor + (size == "layer_idx")
            data = json.dumps(manifest | {"model": model}).encode()
            yield Change(f"{MANIFEST}: {size} times {factor}", lambda path, data=data: write(path, MANIFEST, data))


def _with_graphs(manifest: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """A manifest with another config, whose graphs are recorded as the config asks for them."""
    from optimum_neuron.artifact.manifest import config_of, describe_graph
    from optimum_neuron.step.model_spec import ModelSpec
    from optimum_neuron.step.spec import graph_specs

    changed = manifest | {"config": manifest["config"] | sizes}
    model = ModelSpec.from_dict(manifest["model"])
    return changed | {"graphs": {spec.name: describe_graph(spec, model) for spec in graph_specs(config_of(changed))}}


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
        "flipped at the start": lambda data: _flipped(data, 1),
        "flipped in the middle": lambda data: _flipped(data, len(data) // 2),
        "flipped at the end": lambda data: _flipped(data, len(data) - 20),
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
    for name, other in zip(code, code[1:] + code[:1], strict=True):
        for vouched in (False, True):
            change = partial(damage, name=name, how=bytes, vouched=vouched, other=other)
            yield Change(f"{name} is {other}{', vouched' * vouched}", change)
    for folder in ("graphs", "weights") if code else ("weights",):
        yield Change(f"{folder} linked elsewhere", partial(_link, name=folder))
    foreign = ("kernels.so", "foreign.json", "token_generation_context64.safetensors")
    for name in (*(f"graphs/{each}" for each in foreign), "weights/tp0.safetensors"):
        if name not in names:
            yield Change(f"{name} added", partial(_add, name=name))


def _flipped(data: bytes, offset: int) -> bytes:
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

    def change(label: str, text: str | dict[str, Any], tail: bytes = body, claimed: int | None = None) -> Change:
        encoded = (json.dumps(text) if isinstance(text, dict) else text).encode()
        head = (len(encoded) if claimed is None else claimed).to_bytes(8, "little")
        return Change(f"{WEIGHTS} header: {label}", lambda path: write(path, WEIGHTS, head + encoded + tail))

    for place in _places({name: header[name]}):
        for value in (*WRONG, *_near(_at(header, place))):
            if json.dumps(value) == json.dumps(_at(header, place)):
                continue
            label = f"{'.'.join(map(str, place))} = {json.dumps(value)[:40]}"
            yield change(label, _replaced(header, place, value))
        yield change(f"without {'.'.join(map(str, place))}", _replaced(header, place, None, remove=True))
    start, stop = header[name]["data_offsets"]
    for label, offsets in {
        "negative": [-8, stop - start - 8],
        "beyond": [HUGE, HUGE + stop - start],
        "reversed": [stop, start],
    }.items():
        yield change(f"offsets {label}", header | {name: header[name] | {"data_offsets": offsets}})
    yield change("overlapping", header | {name: header[other]})
    yield change("flattened", header | {name: header[name] | {"shape": [(stop - start) // 4]}})
    yield change("another type of its size", header | {name: header[name] | {"dtype": "I32"}})
    yield change("transposed", header | {name: header[name] | {"shape": header[name]["shape"][::-1]}})
    yield change("names swapped", header | {name: header[other], other: header[name]})
    yield change("a tensor more", header | {"model.more": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}})
    yield change("a name twice", json.dumps(header)[:-1] + f', "{name}": {json.dumps(header[other])}}}')
    yield change("metadata of another type", header | {"__metadata__": {"x": 3}})
    yield change("trailing bytes", header, body + b"\0" * 64)
    yield change("bytes missing", header, body[:-64])
    for label, claimed in {
        "0": 0,
        "2**63": 2**63,
        "2**40": HUGE,
        "one more": length + 1,
        "one fewer": length - 1,
    }.items():
        yield change(f"claims {label}", json.dumps(header, separators=(",", ":")), claimed=claimed)
    for label, text in {"no JSON": "x", "a list": "[]", "nested": "[" * 100_000, "empty": "{}"}.items():
        yield change(label, text)


def _model_configs(artifact: Path) -> Iterator[Change]:
    """Sizes in config.json that weights and manifest contradict; vouched for by the manifest."""
    config = read_json(artifact / "config.json")
    yield from _values("config.json", config, [(size,) for size in CONFIG_SIZES if size in config])
    for label, text in {
        "no JSON": "{",
        "a list": "[]",
        "another model": '{"model_type": "gpt2"}',
        "no model": '{"model_type": "x"}',
    }.items():
        yield Change(f"config.json: {label}", lambda path, text=text: write(path, "config.json", text.encode()))


def _descriptions(artifact: Path, manifest: dict[str, Any]) -> Iterator[Change]:
    """What stands beside graphs in HLO; vouched for by the manifest."""
    names = [name for name in manifest["files"] if name.startswith("graphs/") and name.endswith(".json")]
    for name in names[:2]:
        yield from _values(name, read_json(artifact / name))
