"""The loops of the selective scan on CPUs: their exponential, and bits that do not depend on how a prompt was cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples

pytest.importorskip("numba")

from numba import njit, types
from numba.extending import intrinsic
from recurrent_cases import UNIT, Run, cut, fresh_view, given_operands, run

from pallas_kernels.cpu_tiles import LANES, VectorCode
from pallas_kernels.recurrent import cpu_scan as scan
from pallas_kernels.recurrent.layout import NEW


def compiled(emit):
    """Return a function of an array that applies what `emit` appends to each vector."""

    @intrinsic
    def of_vector(typingctx, x, out):
        def generate(context, builder, signature, args):
            code = VectorCode(builder)
            code.store(emit(code, code.load(args[0])), args[1])
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), generate

    @njit
    def of_array(x):
        out = np.empty_like(x)
        for at in range(0, len(x), LANES):
            of_vector(x.ctypes.data + 4 * at, out.ctypes.data + 4 * at)
        return out

    return of_array


WAYS = [scan._exp2_of_any, *([scan._exp2_of_avx512] if LANES == 16 else [])]


@pytest.mark.parametrize("emit", WAYS)
def test_the_exponential_errs_by_less_than_two_units_in_the_last_place(emit):
    x = -np.concatenate([np.linspace(0, 126, 2**16), np.logspace(-30, 2, 2**12)]).astype(np.float32)
    np.testing.assert_allclose(compiled(emit)(x), 2.0 ** x.astype(np.float64), rtol=2.0**-22, atol=2.0**-126)


@pytest.mark.parametrize("emit", WAYS)
def test_what_is_not_forgotten_stays_as_it_is_and_what_is_wholly_forgotten_is_nothing(emit):
    x = np.repeat(np.float32([0, -1e-30, -127, -1e4, -3e5, -1e9, -1e38]), LANES)
    kept, forgotten = np.split(compiled(emit)(x), [2 * LANES])
    np.testing.assert_array_equal(kept, 1)
    assert np.all((forgotten >= 0) & (forgotten <= 2.0**-126))


@settings(max_examples=examples(15), deadline=None)
@given(
    lengths=st.lists(st.integers(1, UNIT), min_size=1, max_size=6),
    read=st.sampled_from([NEW, 5]),
    by_tokens=st.booleans(),
)
def test_bits_do_not_depend_on_where_a_prompt_was_cut(lengths, read, by_tokens):
    name = "wide selective_scan"
    operands, constants = given_operands(name)
    total = min(sum(lengths), 2 * UNIT)
    ends = sorted({min(end, total) for end in np.cumsum(lengths)})
    mine = [1] * total if by_tokens else np.diff([0, *ends]).tolist()

    def cut_so(lengths, **how):
        prompt = Run(read, tuple(lengths), (*[-1] * (len(lengths) - 1), 5))
        return run(name, "cpu", fresh_view(name), cut([], [prompt], **how), operands, constants)

    whole = [UNIT] * (total // UNIT) + [total % UNIT] * (total % UNIT > 0)
    for one, other in zip(cut_so(mine, most=1 if by_tokens else UNIT), cut_so(whole), strict=True):
        np.testing.assert_array_equal(one, other)
