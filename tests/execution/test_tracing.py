"""What a model is told of the devices it is traced for."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_model import plan, tiny_llama

from jpaged.execution import Bucket, make_step
from jpaged.execution.batch import empty_batch
from jpaged.execution.mesh import make_mesh
from jpaged.execution.tracing import traced_for
from jpaged.model_api import LIVE_ROWS, PRODUCT_IMPL, UNROLL_LAYERS


def test_a_cpu_that_holds_the_model_alone_multiplies_with_its_own_kernel():
    with traced_for(make_mesh(1)):
        assert PRODUCT_IMPL.get() == "cpu"
        assert not UNROLL_LAYERS.get()
    assert PRODUCT_IMPL.get() == "xla"


def test_the_kernels_that_were_asked_for_multiply():
    with traced_for(make_mesh(1), "reference"):
        assert PRODUCT_IMPL.get() == "reference"


def test_sharded_weights_are_left_to_xla():
    with traced_for(SimpleNamespace(devices=make_mesh(1).devices, size=2)):
        assert PRODUCT_IMPL.get() == "xla"


def test_the_number_of_tokens_that_are_no_padding_is_told():
    with traced_for(make_mesh(1), live_rows=3):
        assert LIVE_ROWS.get() == 3
    assert LIVE_ROWS.get() is None


def test_what_was_set_before_returns_after_an_error():
    with pytest.raises(KeyError), traced_for(make_mesh(1)):
        raise KeyError
    assert PRODUCT_IMPL.get() == "xla"


def test_padding_of_a_step_passes_a_cpus_products_by():
    graphdef, params, groups = tiny_llama()
    spec, bucket = plan(groups, 24), Bucket(8, 8, True)
    step = make_step(graphdef, spec, make_mesh(1), kernel_impl="cpu")
    batch = empty_batch(bucket, spec.layout, max_num_seqs=8, max_model_len=64)
    pool, last = jnp.zeros(spec.shape, spec.dtype), jnp.zeros(8, jnp.int32)
    _, _, hidden = step(params, pool, batch, last, decode_only=True)
    model = nnx.merge(graphdef, params)
    np.testing.assert_allclose(hidden, model.norm(model.embed(batch.tokens, batch.positions)), rtol=1e-6)
