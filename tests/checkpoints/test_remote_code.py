# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with modeling code of their own: run only when trusted, carried by the artifact, refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapting import lora
from helpers import random_tokens, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM

from optimum_neuron import NeuronModelForCausalLM, export_model
from optimum_neuron.checkpoints.checkpoint import Checkpoint


MODELING = """
from transformers import LlamaConfig, LlamaForCausalLM

from .numbers_tiny import SCALE


class TinyConfig(LlamaConfig):
    model_type = "tiny_of_its_own"


class TinyForCausalLM(LlamaForCausalLM):
    config_class = TinyConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * SCALE
        return output
"""


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "modeling_tiny.py").write_text(MODELING, encoding="utf-8")
    (folder / "numbers_tiny.py").write_text("SCALE = -0.7\n", encoding="utf-8")
    config = json.loads((tiny_checkpoint / "config.json").read_text(encoding="utf-8"))
    names = {"AutoConfig": "modeling_tiny.TinyConfig", "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"}
    config |= {"model_type": "tiny_of_its_own", "architectures": ["TinyForCausalLM"], "auto_map": names}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    loaded = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_config(loaded, dtype=torch.float32, trust_remote_code=True)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    weights = tmp_path / "weights"
    model.save_pretrained(weights)
    (weights / "model.safetensors").rename(folder / "model.safetensors")
    return folder


def load(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, trust_remote_code=True).eval()


@pytest.mark.parametrize("target", ["eager", pytest.param("cpu", marks=pytest.mark.slow)])
def test_trusted_code_is_exported_and_runs_alone(target: str, checkpoint: Path, tmp_path: Path) -> None:
    prompt = torch.from_numpy(random_tokens(20)).long()[None]
    model, expected = load(checkpoint), prompt
    for _ in range(8):
        expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], 1)
    config = tiny_config(target=target, mixed_step=False)
    artifact = export_model(checkpoint, tmp_path / "artifact", config=config, trust_remote_code=True)
    for name in ("modeling_tiny.py", "numbers_tiny.py", "config.json"):
        assert (artifact / name).read_bytes() == (checkpoint / name).read_bytes()
    checkpoint.rename(tmp_path / "gone")
    model = NeuronModelForCausalLM.from_pretrained(artifact, trust_remote_code=True)
    tokens = model.generate(prompt, do_sample=False, max_new_tokens=8, eos_token_id=None, pad_token_id=0)
    assert torch.equal(tokens, expected)
    with pytest.raises(ValueError, match=r"trust_remote_code"):
        NeuronModelForCausalLM.from_pretrained(artifact)


def test_code_that_is_not_trusted_is_not_run(checkpoint: Path, tmp_path: Path) -> None:
    code = checkpoint / "modeling_tiny.py"
    code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n" + code.read_text(encoding="utf-8"), encoding="utf-8")
    words = r"brings its own modeling code; read it, then pass --trust-remote-code \(trust_remote_code=True\)"
    with pytest.raises(ValueError, match=words) as caught:
        export_model(checkpoint, tmp_path / "out" / "artifact", config=tiny_config())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists() and not (tmp_path / "ran").exists()


def test_code_that_need_not_run_is_left_out(tiny_checkpoint: Path, checkpoint: Path, tmp_path: Path) -> None:
    """A Llama whose config names code is exported by transformers' own class where the code is not trusted."""
    document = json.loads((tiny_checkpoint / "config.json").read_text(encoding="utf-8"))
    names = {"AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"}
    (checkpoint / "config.json").write_text(json.dumps(document | {"auto_map": names}), encoding="utf-8")
    (checkpoint / "model.safetensors").write_bytes((tiny_checkpoint / "model.safetensors").read_bytes())
    artifact = export_model(checkpoint, tmp_path / "artifact", config=tiny_config())
    assert not list(artifact.glob("*.py"))
    assert type(Checkpoint(checkpoint, None, "x", False).load_model("auto")).__name__ == "LlamaForCausalLM"


def test_an_adapter_of_trusted_code_is_merged(checkpoint: Path, tmp_path: Path) -> None:
    adapted = peft.get_peft_model(load(checkpoint), lora())
    adapted.save_pretrained(tmp_path / "adapter")
    options: dict[str, Any] = {"config": tiny_config(), "trust_remote_code": True, "adapter": tmp_path / "adapter"}
    artifact = export_model(checkpoint, tmp_path / "artifact", **options)
    model = NeuronModelForCausalLM.from_pretrained(artifact, trust_remote_code=True)
    prompt = torch.from_numpy(random_tokens(20)).long()[None]
    with torch.inference_mode():
        expected = adapted.eval()(input_ids=prompt).logits[:, -1:]
    found = model(prompt, logits_to_keep=1).logits
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)
