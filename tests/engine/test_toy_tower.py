"""A package adds a family by one tower file and a row: here one that hears, around two text models."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint, entry_points

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from greedy_reference import one_torch_thread
from PIL import Image
from safetensors.torch import load_file, save_file
from toy_sound import FRAME
from transformers import AutoConfig, LlamaConfig, PretrainedConfig, Qwen2Config
from vision_checkpoints import check_empty

from jpaged import LLM, SamplingParams
from jpaged.loading import registry

SOUND = 205
SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 4,
    "max_model_len": 96,
    "max_num_batched_tokens": 24,
    "kv_cache_memory_bytes": 4 << 20,
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0, logit_bias={SOUND: -100})


class HearsConfig(PretrainedConfig):
    model_type = "toy_hears"

    def __init__(self, text_config=None, image_token_id=SOUND, **kwargs):
        kind = {"qwen2": Qwen2Config, "llama": LlamaConfig}
        self.text_config = kind[text_config["model_type"]](**text_config) if text_config else LlamaConfig()
        self.vision_config, self.image_token_id = PretrainedConfig(), image_token_id
        super().__init__(**kwargs)


AutoConfig.register("toy_hears", HearsConfig, exist_ok=True)


@pytest.mark.parametrize("text", ["llama", pytest.param("qwen2", marks=pytest.mark.nightly)])
def test_a_package_adds_ears_to_any_text_model(text, tmp_path, monkeypatch):
    mine = EntryPoint("toy_hears", "toy_sound:SOUND", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [*entry_points(group=group), mine])
    model = make_checkpoint(text, tmp_path, tie_word_embeddings=False)
    tensors = load_file(tmp_path / "model.safetensors")
    width = model.config.hidden_size
    up = torch.randn(width, FRAME, generator=torch.Generator().manual_seed(0)) * 0.2
    named = {"language_model." + name: tensor for name, tensor in tensors.items()} | {"sound.up.weight": up}
    save_file(named, tmp_path / "model.safetensors", {"format": "pt"})
    own = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "toy_hears", "text_config": own}))

    rng = np.random.default_rng(0)
    sounds = [rng.integers(0, 256, (1, count, 3), dtype=np.uint8) for count in (1, 30, 250)]
    parts = [(3, sounds[0], 2), (5,), (1, sounds[1], 1, sounds[2], 1), (sounds[2], 4, sounds[0])]
    prompts = []
    for each in parts:
        ids, images = [1], []
        for part in each:
            ids += [SOUND] if isinstance(part, np.ndarray) else rng.integers(3, 200, part).tolist()
            images += [Image.fromarray(part)] if isinstance(part, np.ndarray) else []
        prompts.append({"prompt_token_ids": ids} | ({"multi_modal_data": {"image": images}} if images else {}))
    llm = LLM(str(tmp_path), **SETTINGS)
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    for each, output in zip(parts, outputs, strict=True):
        heard = [features(part, up) for part in each if isinstance(part, np.ndarray)]
        assert_torchs(model, heard, output)
    check_empty(llm)


def features(pixels, up):
    """What the tower makes of a sound, in torch."""
    samples = (pixels[0, :, 0].astype(np.int16) + (pixels[0, :, 1].astype(np.int16) << 8)).astype(np.float32)
    padded = np.pad(samples, (0, -len(samples) % FRAME)).reshape(-1, FRAME) * 2**-14
    x = torch.tensor(padded) @ up.T
    return x + (0.5 * x @ x.T).softmax(-1) @ x


def assert_torchs(model, heard, output):
    ids, tokens = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
    with one_torch_thread(), torch.inference_mode():
        whole = torch.tensor([[*ids, *tokens]])
        embeds = model.model.embed_tokens(whole)
        if heard:
            embeds[0, : len(ids)][torch.tensor(ids) == SOUND] = torch.cat(heard)
        logits = model(inputs_embeds=embeds).logits[0, len(ids) - 1 : -1].double().log_softmax(-1).numpy()
    chosen = logits[np.arange(len(tokens)), tokens]
    np.testing.assert_allclose(
        [next(iter(each.values())).logprob for each in output.outputs[0].logprobs], chosen, atol=1e-3
    )
    logits[:, SOUND] -= 100
    assert (logits.max(-1) - chosen).max() < 1e-3
