"""Reads multimodal checkpoints (Gemma 3, Llama 4, Mistral Small 3.1), whole or only the language model.

Tensors get the same names whichever version of transformers wrote them. Those of the text model are named as in a
text-only checkpoint; the others begin with ``vision_tower.`` and so on.
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
"""Maps the beginning of a tensor's name in a multimodal checkpoint (old, new, or without a head) to that in a text-only
checkpoint; the first match counts."""
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
"""The same for tensors outside of the text model; the first match counts."""


def is_multimodal(names: Iterable[str]) -> bool:
    """Tell whether tensors have a multimodal model's names, which a fine-tuned text model alone may also have."""
    return any(name.startswith(_OF_LANGUAGE_MODEL) for name in names)


class LanguageModelReader(RenamedTensors):
    """Reads the text model's tensors as a `TensorReader`, under the names that they have in a text-only checkpoint.

    Args:
        other_parts: whether to read the tensors of the other parts too.

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
        """Tell whether the vocabulary's head is stored apart from the embedding; the configs are not consulted."""
        return "lm_head.weight" in super().names()

    def names(self) -> Iterable[str]:
        """Return the text model's names only, so that unread tensors of other parts are not reported as unused."""
        return self._text.keys()


def _renamed(names: Iterable[str], prefixes: Mapping[str, str]) -> dict[str, str]:
    """Return the names that begin with one of `prefixes`, by their new names."""
    found = {}
    for name in names:
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if prefix is not None:
            found[prefixes[prefix] + name.removeprefix(prefix)] = name
    return found
