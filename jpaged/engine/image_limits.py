"""Says with which models and settings prompts may have images."""

from __future__ import annotations

from jpaged.config import EngineConfig
from jpaged.model_api import CausalLM, TakesImages


def why_no_images(config: EngineConfig, model: CausalLM, several_processes: bool) -> str | None:
    """Return why prompts cannot have images; None where they can.

    Args:
        several_processes: whether the devices belong to several processes.
    """
    if not isinstance(model, TakesImages):
        only = " with language_model_only=True" if config.language_model_only else ""
        return f"prompts are text only, as model={config.model!r}{only} takes no images"
    if several_processes:
        return "images need one process, not several hosts"
    return None


def tokens_together(model: CausalLM) -> int | None:
    """Return how many tokens of an image see each other; None where they do not."""
    if not isinstance(model, TakesImages) or not model.image_group.whole:
        return None
    return max(features for _, features in model.examples())
