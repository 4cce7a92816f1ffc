"""Products by Intel's AMX, run as they are compiled for it; where there is none, its instructions are emulated."""

import platform

import amx_emulator
import pytest
from amx_emulator import run

from pallas_kernels import cpu_features

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is x86-64's"),
    pytest.mark.skipif(bool(amx_emulator.LACKING), reason=f"this machine lacks {', '.join(amx_emulator.LACKING)}"),
    pytest.mark.skipif(amx_emulator.HAS_AMX and not cpu_features.has_amx(), reason="Linux refuses AMX, which is there"),
]

BYTES = """
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from quantised_cases import FORMS, random_matrix

from pallas_kernels.tiled import tiled
from pallas_kernels.tiled_matmul import tiled_matmul, tiled_matmul_grouped

RNG = np.random.default_rng(0)


def same(product, *operands):
    found = [np.asarray(jax.jit(partial(product, kind=kind))(*operands)) for kind in ("amx", "vnni512")]
    np.testing.assert_array_equal(*found)


def by_tiles(matrix, rows):
    before = counted()
    x = RNG.standard_normal((rows, matrix.inputs), np.float32)
    same(tiled_matmul, x, [jax.tree.map(jnp.asarray, matrix)])
    return before is None or counted()["int8 products"] > before["int8 products"]


# Groups of 64, 40 and 16 numbers; panels of an item, others, and one that is narrower.
for form, inputs, outputs in (("int8", 192, 66), ("int8", 200, 16), ("int8 minimums", 96, 48)):
    matrix = tiled(random_matrix(FORMS[form], (inputs, outputs)))
    assert by_tiles(matrix, 16) and by_tiles(matrix, 39) and (not by_tiles(matrix, 15) or counted() is None)

table = tiled(random_matrix(FORMS["int8"], (4, 192, 50)))
same(tiled_matmul_grouped, RNG.standard_normal((60, 192), np.float32), table, jnp.asarray([33, 0, 3, 20]))
"""

PAIRS = """
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bfloat16_matmul import bfloat16_matmul
from pallas_kernels.tiled_floats import tiled_floats

RNG = np.random.default_rng(0)


def rounded(numbers):
    return np.asarray(jnp.asarray(numbers, jnp.bfloat16), np.float64)


for rows, inputs, outputs in ((1, 64, 48), (16, 3, 1), (17, 577, 50), (33, 64, 112), (300, 2100, 40), (64, 32, 33)):
    x, table = (RNG.standard_normal(shape, np.float32) for shape in ((rows, inputs), (inputs, outputs)))
    matrix = [jax.tree.map(jnp.asarray, tiled_floats(table, -2))]
    found = np.asarray(bfloat16_matmul(jnp.asarray(x), matrix, kind="amx"))
    want = rounded(x) @ rounded(table)
    np.testing.assert_allclose(found, want, atol=1e-5 * np.abs(want).max())
    alone = np.asarray(bfloat16_matmul(jnp.asarray(x[-1:]), matrix, kind="amx"))
    np.testing.assert_array_equal(found[-1:], alone)
assert counted() is None or counted()["bfloat16 products"] > 1000
"""

UNCONFIGURED = """
import numpy as np
from numba import njit

from pallas_kernels.bfloat16_matmul.cpu_amx import tile_product

product = tile_product(1, 1)


@njit
def multiply(at):
    product(at, 64, at, 1024, 1, at, 64, 0)


memory = np.zeros(4096, np.uint8)
multiply(memory.ctypes.data)
"""

TESTS = """
import sys

import pytest

sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:faulthandler", *sys.argv[1:]]))
"""

ANSWERS = """
import sys

from jpaged import LLM, SamplingParams
from pallas_kernels import cpu_features

if sys.argv[2] == "registers":
    cpu_features.has_amx = lambda: False
settings = {"dtype": "bfloat16"} if sys.argv[1] == "bfloat16" else {"quantization": sys.argv[1]}
llm = LLM("smollm2-135m", **settings, max_model_len=128, max_num_seqs=24, kv_cache_memory_bytes=64_000_000)
prompts = [f"{name} is the capital of" for name in ("Paris", "Rome", "Oslo", "Lima", "Cairo", "Delhi") * 4]
for answer in llm.generate(prompts, SamplingParams(max_tokens=4, temperature=0), use_tqdm=False):
    print(answer.outputs[0].token_ids)
if counted() is not None:
    of_kind = counted()["bfloat16 products" if sys.argv[1] == "bfloat16" else "int8 products"]
    assert (of_kind > 1000) == (sys.argv[2] == "tiles"), of_kind
"""


def completed(code, folder, *arguments):
    found = run(code, folder, *arguments)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
    return found.stdout


def test_bytes_get_the_bits_of_products_in_registers(tmp_path):
    completed(BYTES, tmp_path)


def test_pairs_are_multiplied_as_in_float64_and_rows_do_not_meet(tmp_path):
    completed(PAIRS, tmp_path)


@pytest.mark.nightly
@pytest.mark.skipif(amx_emulator.HAS_AMX, reason="the processor has no messages")
def test_tiles_without_sizes_are_noticed(tmp_path):
    found = run(UNCONFIGURED, tmp_path)
    assert found.returncode != 0 and "no tiles are configured" in found.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("module", ["test_tiled_matmul.py", "test_bfloat16_matmul.py", "test_screened_argmax.py"])
def test_all_tests_of_products_pass_with_it(module, tmp_path):
    completed(TESTS, tmp_path, str(amx_emulator.SOURCE.with_name(module)))


@pytest.mark.nightly
def test_an_engine_in_8_bits_answers_as_without_it(tmp_path):
    by_tiles, in_registers = (completed(ANSWERS, tmp_path, "int8", how) for how in ("tiles", "registers"))
    assert len(by_tiles.splitlines()) == 24 and by_tiles == in_registers


@pytest.mark.nightly
def test_an_engine_in_bfloat16_answers_by_it(tmp_path):
    """Sums have another order than in registers, so that answers may differ."""
    by_tiles, in_registers = (
        completed(ANSWERS, tmp_path, "bfloat16", how).splitlines() for how in ("tiles", "registers")
    )
    equal = sum(one == other for one, other in zip(by_tiles, in_registers, strict=True))
    assert len(by_tiles) == 24 and equal >= 20
