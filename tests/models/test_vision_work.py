"""What a patch costs a tower is counted in tokens of the text model, from the sizes of both."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from flax import nnx
from transformers import MixtralConfig
from vision_checkpoints import gemma3_config

from jpaged.model_api import BuildContext
from jpaged_models.gemma import Gemma
from jpaged_models.mixtral import Mixtral
from jpaged_models.vision import parts
from jpaged_models.vision.gemma3 import GEMMA3
from jpaged_models.vision.work import products


def built(family, config):
    return nnx.eval_shape(lambda: family(config, BuildContext(dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0))))


def test_every_patch_of_a_picture_goes_through_all_layers_of_the_tower():
    config = gemma3_config()
    model = built(GEMMA3.around(Gemma), config)
    vision, group = config.vision_config, model.image_group
    size, inner = vision.hidden_size, vision.intermediate_size
    matrices = vision.num_hidden_layers * (4 * size * size + 2 * size * inner)
    assert matrices < products(model.vision) < 1.2 * matrices, "biases and norms are little"
    assert group.patches == "pixels" and group.work == products(model.vision) / products(model.layers)
    deeper = gemma3_config()
    deeper.vision_config.num_hidden_layers *= 3
    assert built(GEMMA3.around(Gemma), deeper).image_group.work == pytest.approx(3 * group.work)


@pytest.mark.parametrize("times", [0, 2])
def test_a_tower_that_does_not_call_its_layers_once_is_refused_by_name(times, monkeypatch):
    """A package's own tower may."""
    stack = SimpleNamespace(instead=None, begun=lambda hidden: hidden, ended=lambda state: (state,))
    monkeypatch.setattr(parts, "stack_of", lambda _: stack)

    class Twice:
        def __call__(self, row, attend):
            return [stack.instead(stack, 0, None, None, attend) for _ in range(times)]

    with pytest.raises(ValueError, match=f"Twice calls its LayerStack {times} times"):
        parts.entering(Twice(), {}, None)


@pytest.mark.parametrize("per_token", [1, 3, 4])
def test_a_token_meets_its_share_of_the_experts(per_token):
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MixtralConfig(
        **sizes, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=per_token, vocab_size=99
    )
    config_of_all = MixtralConfig(**config.to_dict() | {"num_experts_per_tok": 4})
    expert = 2 * 3 * 32 * 24
    less = products(built(Mixtral, config_of_all)) - products(built(Mixtral, config))
    assert less == pytest.approx((4 - per_token) * expert)
