"""Reads multimodal checkpoints (Gemma 3, Llama 4, Mistral Small 3.1), with or without their eyes and ears.

Tensors have one name here whatever version of transformers wrote them: that of a checkpoint of text only for the text
model's, and ``vision_tower.`` and so on for the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jpaged.loading.renamed_tensors import RenamedTensors
from jpaged.loading.tensor_reader import TensorReader

_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "language_model.": "model.",
    "lm_head.": "lm_head.",
}
"""The beginning of a tensor's name in a multimodal checkpoint, old, new or without a head, -> that in a checkpoint of
text only; the first that fits counts."""
_OF_LANGUAGE_MODEL = ("language_model.", "model.language_model.")

_OTHER_PARTS = {
    "model.vision_tower.vision_model.": "vision_tower.",
    "model.vision_tower.": "vision_tower.",
    "vision_tower.vision_model.": "vision_tower.",
    "vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "multi_modal_projector.": "multi_modal_projector.",
    "model.vision_model.": "vision_model.",
    "vision_model.": "vision_model.",
    "model.image_newline": "image_newline",
    "image_newline": "image_newline",
}
"""The same for what is no part of the text model; the first that fits counts."""


def is_multimodal(names: Iterable[str]) -> bool:
    """Tell whether tensors have a multimodal model's names, as fine-tuning its text model alone may leave them too."""
    return any(name.startswith(_OF_LANGUAGE_MODEL) for name in names)


class LanguageModelReader(RenamedTensors):
    """Reads the text model's tensors as a `TensorReader`, under the names they have where it stands alone.

    Args:
        other_parts: whether the tensors of the other parts are read too.

    Raises:
        ValueError: the checkpoint has no text model.
    """

    def __init__(self, whole: TensorReader, *, other_parts: bool = False):
        self._text = _renamed(whole.names(), _PREFIXES)
        if not self._text:
            raise ValueError(f"{whole.location} has a text_config, but no tensor begins with {', '.join(_PREFIXES)}")
        super().__init__(whole, self._text | (_renamed(whole.names(), _OTHER_PARTS) if other_parts else {}))

    @property
    def has_head(self) -> bool:
        """Tell whether the vocabulary's head is stored apart from the embedding, whatever the configs say."""
        return "lm_head.weight" in super().names()

    def names(self) -> Iterable[str]:
        """Name the text model's tensors: what a family leaves of the other parts is not forgotten."""
        return self._text.keys()


def _renamed(names: Iterable[str], prefixes: Mapping[str, str]) -> dict[str, str]:
    """Return the names that begin with one of `prefixes` by those they get instead."""
    found = {}
    for name in names:
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if prefix is not None:
            found[prefixes[prefix] + name.removeprefix(prefix)] = name
    return found
