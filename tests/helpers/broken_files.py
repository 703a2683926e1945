# SPDX-License-Identifier: Apache-2.0
"""The files that tests/helpers/command_lines.py names, made when they are asked for: whole ones, and broken ones of every kind."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import tampering
import torch
from command_lines import CONFIGS, MISFITS, NO_OBJECT, TOKENIZERS
from gguf_files import close_writer
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


TEMPLATES = {"syntax": "{% for x in %}", "raises": "{{ raise_exception('no such role') }}"}
MANIFESTS = {"list": b"[]", "nothing": b"", "half": b'{"format": ', "object": b"{}", "bytes": b"\xff\xfe"}
INDICES = {
    "index_list": [], "index_empty": {"weight_map": {}}, "index_numbers": {"weight_map": {"a": 5}},
    "index_missing": {"weight_map": {"a": "x.safetensors"}}, "index_outside": {"weight_map": {"a": "../x.safetensors"}},
}  # fmt: skip


class Files:
    """Paths by name; a name with colons says what is broken, and how."""

    def __init__(self, root: Path, checkpoint: Path, artifact: Path) -> None:
        self.root, self.checkpoint, self.artifact = root, checkpoint, artifact
        self._made = {"checkpoint": checkpoint, "artifact": artifact}
        self._made |= {name: root / name for name in ("empty_folder", "full_folder", "text_file", "link_circle")}
        self._made["empty_folder"].mkdir()
        self._made["full_folder"].mkdir()
        (root / "full_folder" / "own.txt").write_text("mine", encoding="utf-8")
        self._made["text_file"].write_text("words", encoding="utf-8")
        self._made["link_circle"].symlink_to(root / "link_circle")

    def path(self, name: str) -> Path:
        if name not in self._made:
            kind, *rest = name.split(":")
            make: Callable[..., Path] = getattr(self, f"_{kind}")
            self._made[name] = make(*rest)
        return self._made[name]

    def _folder(self, copied: Path) -> Path:
        return Path(shutil.copytree(copied, self.root / str(len(list(self.root.iterdir()))) / "named"))

    def _config(self, name: str) -> Path:
        folder = self._folder(self.checkpoint)
        changes, _ = (CONFIGS | MISFITS)[name]
        document = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(document | changes), encoding="utf-8")
        return folder

    def _object(self, file: str, kind: str) -> Path:
        folder = self._folder(self.checkpoint)
        (folder / file).write_bytes(NO_OBJECT[kind])
        return folder

    def _tokenizer(self, file: str, number: str) -> Path:
        folder = self._folder(self.checkpoint)
        (folder / file).write_bytes(TOKENIZERS[file][int(number)])
        return folder

    def _weights(self, kind: str) -> Path:
        folder = self._folder(self.checkpoint)
        path = folder / "model.safetensors"
        tensors = load_file(path)
        if kind in ("nan", "inf"):
            name = "model.embed_tokens.weight" if kind == "nan" else "model.layers.1.mlp.up_proj.weight"
            tensors[name][:] = float(kind)
            save_file(tensors, path, metadata={"format": "pt"})
        elif kind == "truncated":
            path.write_bytes(path.read_bytes()[:-100])
        elif kind == "none":
            save_file({}, path)
        else:
            path.unlink()
        if kind == "pickled":
            torch.save(tensors, folder / "pytorch_model.bin")
        if kind == "dangling":
            path.symlink_to(folder / "gone")
        if kind in INDICES:
            (folder / "model.safetensors.index.json").write_text(json.dumps(INDICES[kind]), encoding="utf-8")
        return folder

    def _adapter(self, kind: str) -> Path:
        folder = self.root / f"adapter_{kind}"
        model = AutoModelForCausalLM.from_pretrained(self.checkpoint)
        adapter = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        get_peft_model(model, adapter).save_pretrained(folder)
        config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
        document = json.loads(config.read_text(encoding="utf-8"))
        if kind == "no_config":
            config.unlink()
        elif kind in ("no_weights", "pickled"):
            weights.rename(folder / "adapter_model.bin" if kind == "pickled" else folder / "gone")
        elif kind == "truncated":
            weights.write_bytes(weights.read_bytes()[:-8])
        elif kind != "good":
            changed = {
                "rank": document | {"r": 2**40}, "kind": document | {"peft_type": "zzz"}, "list": [],
                "empty_object": {},
            }  # fmt: skip
            config.write_text(json.dumps(changed[kind]), encoding="utf-8")
        return folder

    def _gguf(self, kind: str) -> Path:
        path = self.root / f"{kind}.gguf"
        changes = {"layers": {"block_count": 100_000}, "zero_heads": {"head_count": 0}, "countless": {"embedding_length": 2**32 - 1},
                   "no_heads": {"head_count": None}, "many_words": {"embedding_length": 2**20}}  # fmt: skip
        write_tiny_gguf(path, tensors=kind != "no_tensors", **changes.get(kind, {}))
        data = path.read_bytes()
        broken = {
            "empty": b"", "magic": b"XXXX" + data[4:], "version": data[:4] + struct.pack("<I", 99) + data[8:], "header": data[:60],
            "half": data[: len(data) // 2], "counts": data[:8] + struct.pack("<QQ", 2**60, 2**60) + data[24:],
        }  # fmt: skip
        path.write_bytes(broken.get(kind, data))
        return path

    def _manifest(self, kind: str) -> Path:
        folder = self._folder(self.artifact)
        (folder / "neuron_config.json").unlink()
        if kind != "missing":
            (folder / "neuron_config.json").write_bytes(MANIFESTS[kind])
        return folder

    def _template(self, kind: str) -> Path:
        noted = json.loads((self.artifact / "neuron_text.json").read_text(encoding="utf-8"))
        content = json.dumps(noted | {"chat_template": TEMPLATES[kind]})
        return self._changed_artifact("neuron_text.json", content.encode())

    def _vocabulary(self, kind: str) -> Path:
        return self._changed_artifact("tokenizer.json", b"[]" if kind == "list" else None)

    def _changed_artifact(self, file: str, content: bytes | None) -> Path:
        """An artifact with another file, as if it had been exported with it."""
        folder = self._folder(self.artifact)
        if content is not None:
            tampering.write(folder, file, content)
            return folder
        (folder / file).unlink()
        manifest = tampering.read_json(folder / "neuron_config.json")
        del manifest["files"][file]
        tampering.write(folder, "neuron_config.json", json.dumps(manifest).encode())
        return folder


def write_tiny_gguf(
    path: Path, *, tensors: bool = True, block_count: int = 1, head_count: int | None = 2, embedding_length: int = 64
) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(block_count)
    writer.add_context_length(64)
    writer.add_embedding_length(embedding_length)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_feed_forward_length(64)
    if head_count is not None:
        writer.add_head_count(head_count)
    writer.add_vocab_size(300)
    if tensors:
        writer.add_tensor("token_embd.weight", np.zeros((300, 64), dtype=np.float32))
    close_writer(writer)
