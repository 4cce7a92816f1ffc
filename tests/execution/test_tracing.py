"""What a model is told of the devices it is traced for."""

from types import SimpleNamespace

import pytest

from jpaged.execution.mesh import make_mesh
from jpaged.execution.tracing import traced_for
from jpaged.model_api import PRODUCT_IMPL, UNROLL_LAYERS


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


def test_what_was_set_before_returns_after_an_error():
    with pytest.raises(KeyError), traced_for(make_mesh(1)):
        raise KeyError
    assert PRODUCT_IMPL.get() == "xla"
