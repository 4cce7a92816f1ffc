"""A step tells its model how many rows are tokens, and a CPU multiplies no others."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from tiny_model import plan, tiny_llama

from jpaged.execution import Bucket, make_step
from jpaged.execution.batch import empty_batch
from jpaged.execution.mesh import make_mesh


def test_padding_of_a_step_passes_a_cpus_products_by():
    graphdef, params, groups = tiny_llama()
    spec, bucket = plan(groups, 24), Bucket(8, 8, True)
    step = make_step(graphdef, spec, make_mesh(1), kernel_impl="cpu")
    batch = empty_batch(bucket, spec, max_num_seqs=8, max_model_len=64)
    pool, last = jnp.zeros(spec.shape, spec.dtype), jnp.zeros(8, jnp.int32)
    _, _, hidden = step(params, pool, batch, last, decode_only=True)
    model = nnx.merge(graphdef, params)
    np.testing.assert_allclose(hidden, model.norm(model.embed(batch.tokens, batch.positions)), rtol=1e-6)
