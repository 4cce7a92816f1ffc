"""What a model is told of the devices it will run on."""

from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jpaged.execution.mesh import make_mesh
from jpaged.loading.build_context import build_context, layers_are_stacked
from jpaged.model_api import TENSOR_AXIS
from jpaged_models.linear import Linear


@pytest.mark.parametrize(
    ("platform", "kernels", "stacked"),
    [("tpu", "tpu", True), ("gpu", "xla", True), ("cuda", "xla", True), ("gpu", "gpu", False), ("cpu", None, False)],
)
def test_tpus_scan_over_stacks_and_so_do_gpus_that_run_xlas_attention(platform, kernels, stacked):
    assert layers_are_stacked(platform, kernels) is stacked


def test_a_cpu_that_holds_the_model_alone_multiplies_with_its_own_kernel():
    context = build_context(make_mesh(1), np.float32)
    assert context.product_impl == "cpu"
    assert (context.stacked, context.unrolled, context.expert_parallel) == (False, False, False)


def test_the_kernels_that_were_asked_for_multiply():
    assert build_context(make_mesh(1), np.float32, kernel_impl="reference").product_impl == "reference"


def several(platform="cpu", size=2):
    """A mesh that this machine may not have."""
    devices = np.array([SimpleNamespace(platform=platform, device_kind="a device")] * size)
    return SimpleNamespace(devices=devices, size=size, shape={TENSOR_AXIS: size})


def test_sharded_weights_of_a_cpu_are_left_to_xla():
    context = build_context(several(), np.float32)
    assert (context.product_impl, context.tensor_parallel) == ("xla", 2)


def test_gpus_run_layers_one_after_the_other_and_tpus_stack_them():
    gpu = build_context(several("cuda"), np.float32, kernel_impl="gpu")
    assert (gpu.stacked, gpu.unrolled, gpu.product_impl) == (False, True, "gpu")
    tpu = build_context(several("tpu"), np.float32, kernel_impl="tpu")
    assert (tpu.stacked, tpu.unrolled, tpu.product_impl) == (True, False, "tpu")


def test_what_is_asked_for_goes_into_the_context():
    context = build_context(make_mesh(1), "bfloat16", stacked=True, expert_parallel=True)
    assert (context.dtype, context.stacked, context.expert_parallel) == (jnp.bfloat16, True, True)


@pytest.mark.parametrize(("size", "multiplies"), [(1, "gpu"), (2, "xla")])
def test_matrices_that_gpus_split_are_multiplied_by_xla(size, multiplies):
    """It cannot cut a Triton launch."""
    build = build_context(several("cuda", size), np.float16, kernel_impl="gpu")
    assert build.product_impl == "gpu"
    made = nnx.eval_shape(lambda: Linear(8, 8, replace(build, rngs=nnx.Rngs(0)), partition=P(None, TENSOR_AXIS)))
    assert made.impl == multiplies
