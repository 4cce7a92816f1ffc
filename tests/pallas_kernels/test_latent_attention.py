"""Attention to latents: every implementation against dense float64 attention, whose values are part of its keys."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from latent_cases import CASES, LAYER, LAYERS, PAGES, SCALE, SEQS, TOKENS, Case, dense, make_batch, writer
from thorough import examples
from tpu_interpreter import run_recording_races

from pallas_kernels import latent_attention as package
from pallas_kernels.latent_attention import latent_attention, write_and_attend_to_latents
from pallas_kernels.layout import latent_view_shape
from pallas_kernels.paged_attention import Tuning, tpu, tpu_plan
from pallas_kernels.paged_attention.reference import AttentionCall

IMPLS = ["reference", "xla", "cpu", "tpu_interpret"]


@pytest.fixture(autouse=True)
def small_tuning(monkeypatch):
    """Steps of 128 keys, tiles of 32 query rows in products of 16: short contexts and prompts take several."""
    tuning = Tuning(flight_bytes=2**21, decode_scores=0, step_keys=128, product_rows=16, tile_rows=32)
    monkeypatch.setattr(tpu_plan, "tuning_of", lambda *_: tuning)


@cache
def compiled(impl, case, max_query_len=None):
    return jax.jit(partial(latent_attention, impl=impl, rank=case.rank, scale=SCALE, max_query_len=max_query_len))


def assert_close(case, got, want):
    # A score is a sum of more than `rank` products: with 576 of them, about one of 900 examples has an error above 2e-5
    # (2.1e-5 and 2.7e-5 were found).
    in_float32 = 2e-5 if case.rank < 512 else 4e-5
    tolerance = in_float32 if case.dtype == "float32" else 3e-2
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=tolerance)


@pytest.mark.parametrize(
    ("impl", "name"),
    [
        *(("xla", name) for name in CASES),
        *(("cpu", name) for name in CASES),
        *(("reference", name) for name in ("one tile", "DeepSeek's widths")),
        ("tpu_interpret", "a value that ends within a tile of its key, bfloat16"),
        ("tpu_interpret", "int8"),
    ],
)
def test_agrees_with_dense_attention(impl, name):
    case = CASES[name]
    room = PAGES * case.block_size - TOKENS

    @settings(max_examples=examples(5), deadline=None)
    @given(
        queries=st.lists(st.integers(0, 9), max_size=SEQS).filter(lambda lens: sum(lens) <= TOKENS),
        context=st.integers(0, room),
        seed=st.integers(0, 1000),
    )
    def check(queries, context, seed):
        contexts = [context, 0, 5][: len(queries)]
        (q, view, *rest), rows = make_batch(case, queries, contexts, seed, 1 if impl == "cpu" else 8)
        got = compiled(impl, case)(q, view, LAYER, *rest)
        assert got.dtype == q.dtype
        assert_close(case, got, dense(case, (q, view, *rest), rows))

    check()


@pytest.mark.parametrize("impl", ["xla", "cpu"])
def test_decodes_alone_give_what_they_give_among_prompts(impl):
    case = CASES["DeepSeek's widths"]
    (q, view, *rest), rows = make_batch(case, [1, 1, 1], [70, 0, 200])
    got = compiled(impl, case, 1)(q, view, LAYER, *rest)
    assert_close(case, got, dense(case, (q, view, *rest), rows))


def test_the_tpu_kernel_has_no_race():
    case = CASES["DeepSeek's widths"]
    (q, view, *rest), rows = make_batch(case, [3, 1, 9], [150, 100, 0])

    def run(*arrays, interpret):
        return tpu.paged_attention(AttentionCall(*arrays, SCALE, value_dim=case.rank), interpret=interpret)

    got, races = run_recording_races(run, jnp.asarray(q)[:, None], view, LAYER, *map(jnp.asarray, rest))
    assert not races
    assert_close(case, got[:, 0], dense(case, (q, view, *rest), rows))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["DeepSeek's widths", "int8"])
def test_a_launch_that_writes_and_attends_gives_the_bits_of_two(name):
    case, lengths, impl = CASES[name], [70, 0, 20], "tpu_interpret"
    (q, view, tables, starts, lens), _ = make_batch(case, [1, 1, 1], lengths)
    new = np.random.default_rng(1).normal(size=(len(q), case.width)).astype(np.float32)
    slots = np.full(len(q), -1, np.int32)
    size = case.block_size
    slots[: len(lengths)] = [tables[seq, at // size] * size + at % size for seq, at in enumerate(lengths)]
    batch = (tables, starts, lens)
    fused = jax.jit(partial(write_and_attend_to_latents, rank=case.rank, scale=SCALE, impl=impl))
    view_of_one, out = fused(q, view, LAYER, new, *batch)
    written = writer("reference")(view, LAYER, new, slots)
    assert np.asarray(view_of_one).tobytes() == np.asarray(written).tobytes()
    assert np.asarray(out).tobytes() == np.asarray(compiled(impl, case, 1)(q, written, LAYER, *batch)).tobytes()


@pytest.mark.parametrize("impl", IMPLS[1:])
@pytest.mark.parametrize("case", [CASES["one tile"], CASES["int8"]], ids=["floats", "codes"])
def test_writes_what_the_reference_writes_and_drops_slots_beyond_the_view(impl, case):
    random = np.random.default_rng(0)
    shape = latent_view_shape(4, LAYERS, case.width, case.block_size, case.held or case.dtype, 8)
    view = jnp.asarray(random.integers(-100, 100, shape)).astype(case.held or case.dtype)
    rows = random.normal(size=(6, case.width)).astype(np.float32)
    slots = np.asarray([3, 4, 5, 4 * case.block_size, -1, case.block_size], np.int32)
    want = writer("reference")(view, LAYER, rows, slots)
    np.testing.assert_array_equal(writer(impl)(view, LAYER, rows, slots), want)
    assert (np.asarray(want) != np.asarray(view)).any()


def test_a_gpu_leaves_other_rows_to_xla_and_says_so(caplog):
    case = Case(300, 20)  # three tiles of latent
    (q, view, *rest), _ = make_batch(case, [1], [3])
    package._say_once.cache_clear()
    got = compiled("gpu", case)(q, view, LAYER, *rest)
    assert "XLA's version runs" in caplog.text
    np.testing.assert_array_equal(got, compiled("xla", case)(q, view, LAYER, *rest))


def test_a_view_of_other_latents_and_a_rank_beyond_them_are_refused():
    (q, view, *rest), _ = make_batch(CASES["DeepSeek's widths"], [1], [3])
    with pytest.raises(ValueError, match="does not hold latents of 128 lanes"):
        latent_attention(q[..., :128], view, LAYER, *rest, rank=100, scale=SCALE)
    with pytest.raises(ValueError, match="rank=577 must be from 1 to the queries' width 576"):
        latent_attention(q, view, LAYER, *rest, rank=577, scale=SCALE)
