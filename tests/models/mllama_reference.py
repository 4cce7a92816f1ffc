"""transformers' Llama 3.2 Vision as Meta's own code computes it, which its weights were trained with."""

from transformers import MllamaForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput


def taking_what_enters(model: MllamaForConditionalGeneration) -> MllamaForConditionalGeneration:
    """Make the encoder hand on what enters each of its intermediate layers, as Meta's code, vLLM and transformers up to
    4.54 do. Later ones take what leaves it."""

    def shifted(_, args, kwargs, out):
        (entered,) = args
        return BaseModelOutput(last_hidden_state=out.last_hidden_state, hidden_states=(entered, *out.hidden_states))

    model.model.vision_model.transformer.register_forward_hook(shifted, with_kwargs=True)
    return model
