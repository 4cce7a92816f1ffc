"""Families of a package outside jpaged that see pictures as features only, and what transformers makes of the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import numpy as np
import torch
from greedy_reference import one_torch_thread

from jpaged.images import GIVEN_FEATURES
from jpaged.model_api import BuildContext, ImageGroup
from jpaged_models.families import Family
from jpaged_models.qwen3_next import Qwen3Next

IMAGE = 205
"""The id that stands for an image, as in `wrapped_families`."""


def _see(model: Any, config: Any, build: BuildContext) -> None:
    levels = 1 + len(getattr(config.vision_config, "deepstack_visual_indexes", ()))
    width, dtype = config.text_config.hidden_size, np.dtype(build.dtype).name
    model.image_group = ImageGroup("images", (), width, dtype, axes=3, levels=levels)
    model.layer_groups = (*model.layer_groups, model.image_group)
    model.encoder_parts = ()


class _GivenOnly:
    """The methods of `jpaged.model_api.TakesImages` for a model without an encoder."""

    def encode(self, arrays: Mapping[str, Any]) -> Any:
        raise AssertionError("no encoder")

    def padded(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return arrays

    def examples(self) -> Iterator[tuple[Mapping[str, np.ndarray], int]]:
        group = self.image_group
        yield {GIVEN_FEATURES: np.zeros((256, group.levels * group.width), np.float32)}, 256


class Qwen(_GivenOnly, Family):
    """Qwen2-VL, Qwen3-VL, GLM-4.1V and others whose text model is a `Family`."""

    def __init__(self, config: Any, build: BuildContext):
        super().__init__(config.text_config, build)
        _see(self, config, build)


class Qwen35(_GivenOnly, Qwen3Next):
    """Qwen3.5."""

    def __init__(self, config: Any, build: BuildContext):
        super().__init__(config.text_config, build)
        _see(self, config, build)


def installed(monkeypatch: Any, name: str) -> None:
    """Register the family for a ``model_type``, as a package with an entry point would."""
    from jpaged.loading import registry

    value = "given_families:" + ("Qwen35" if name.startswith("qwen3_5") else "Qwen")
    mine = EntryPoint(name, value, registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [*entry_points(group=group), mine])


def prompt_of(parts: list[Any], width: int, seed: int = 0) -> dict[str, Any]:
    """A prompt of ids: a number is as many random tokens, a triple an image of that grid (in patches, merged by 2)."""
    rng, ids, grids = np.random.default_rng(seed), [1], []
    for part in parts:
        if isinstance(part, int):
            ids += rng.integers(3, 200, part).tolist()
        else:
            ids.append(IMAGE)
            grids.append(part)
    if not grids:
        return {"prompt_token_ids": ids}
    features = rng.normal(0, 0.4, (sum(t * h * w // 4 for t, h, w in grids), width)).astype(np.float32)
    return {
        "prompt_token_ids": ids,
        "multi_modal_data": {"image": {"image_embeds": features, "image_grid_thw": np.array(grids)}},
    }


def torch_logits(model: Any, prompt: dict[str, Any], ids: list[int]) -> np.ndarray:
    """Return transformers' logits of the tokens of a prompt whose images are expanded, and of those after them."""
    given = prompt.get("multi_modal_data", {}).get("image")
    whole, shown = torch.tensor([ids]), torch.tensor([ids]) == IMAGE
    with one_torch_thread(), torch.inference_mode():
        text = model.model.language_model
        embeds, more = text.embed_tokens(whole), {}
        if given is not None:
            width = embeds.shape[-1]
            features = torch.tensor(given["image_embeds"])
            embeds[shown] = features[:, :width]
            grids = torch.tensor(given["image_grid_thw"])
            positions = model.model.get_rope_index(whole, shown.int(), image_grid_thw=grids)[0]
            more = {"position_ids": positions}
            if features.shape[1] > width:
                levels = features[:, width:].reshape(len(features), -1, width)
                more |= {
                    "visual_pos_masks": shown,
                    "deepstack_visual_embeds": [levels[:, number] for number in range(levels.shape[1])],
                }
        hidden = text(inputs_embeds=embeds, **more).last_hidden_state
        return model.lm_head(hidden)[0].double().numpy()
