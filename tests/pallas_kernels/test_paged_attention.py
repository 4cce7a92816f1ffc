"""Paged attention: the reference against dense float64 attention, every implementation against the reference."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_cases import NOWHERE, Case, dense_attention, last_keys, last_keys_of_images, make_batch
from thorough import by_name, examples, rarely
from tpu_interpreter import run_recording_races

from pallas_kernels.kv_codes import tokens_of
from pallas_kernels.kv_write import kv_write
from pallas_kernels.layout import pack_kv, view_shape
from pallas_kernels.paged_attention import (
    Tuning,
    cpu,
    paged_attention,
    plan_attention,
    tpu,
    tpu_new_rows,
    tpu_plan,
    tpu_ring,
    write_and_attend,
    xla,
)
from pallas_kernels.paged_attention.reference import AttentionCall

IMPLS = ["xla", "cpu", "tpu_interpret"]
CASES = {
    "llama heads": Case(q_per_kv=4),
    "one query head a KV head, packed rows": Case(head_dim=64, kv_heads=3, q_per_kv=1),
    "padded packed rows, bfloat16": Case(head_dim=48, dtype="bfloat16"),
    "two lane tiles, soft cap and window, bfloat16": Case(
        head_dim=256, dtype="bfloat16", soft_cap=5.0, sliding_window=40
    ),
    "window shorter than a block, odd group": Case(q_per_kv=3, sliding_window=5),
    "small blocks": Case(block_size=8, pages=24, sliding_window=70),
    "chunks shorter than a block": Case(q_per_kv=3, chunk_size=11),
    "chunks of several blocks": Case(chunk_size=50, head_dim=64),
    "sinks and a window, odd group": Case(q_per_kv=3, sliding_window=40, sinks=True),
    "decode only, sinks": Case(tokens=4, max_query_len=1, head_dim=64, sinks=True),
    "decode only, chunks": Case(tokens=4, max_query_len=1, chunk_size=150),
    "decode only": Case(tokens=4, max_query_len=1, q_per_kv=7, dtype="bfloat16"),
    "int8, soft cap and sinks, odd group": Case(
        q_per_kv=3, block_size=32, pages=10, codes="int8", soft_cap=5.0, sinks=True
    ),
    "int8, packed rows and window, bfloat16": Case(
        head_dim=48, block_size=64, pages=5, codes="int8", dtype="bfloat16", sliding_window=40
    ),
    "fp8, chunks, bfloat16": Case(block_size=32, pages=10, codes="fp8", dtype="bfloat16", chunk_size=50),
}


OFTEN = (
    *("llama heads", "two lane tiles, soft cap and window, bfloat16", "sinks and a window, odd group"),
    *("int8, soft cap and sinks, odd group", "chunks shorter than a block", "int8, packed rows"),
)
"""Cases that the interpreted kernel of TPUs, which takes seconds for each, meets by day."""


def by_impl(cases, impls):
    """Each implementation with each case."""
    for impl in impls:
        for name, case in cases.items():
            rare = impl == "tpu_interpret" and name not in OFTEN
            yield pytest.param(impl, case, id=f"{impl}-{name}", marks=pytest.mark.nightly if rare else ())


@pytest.fixture(autouse=True)
def small_tuning(monkeypatch):
    """Steps of 128 keys, tiles of 64 query rows: short contexts and prompts take several. A chunk of 16 rows of the
    batch or more fills registers, so its results lie side by side."""
    tune(monkeypatch, step_keys=128, product_rows=64, tile_rows=64)


def tune(monkeypatch, **sizes):
    monkeypatch.setattr(tpu_plan, "tuning_of", lambda *_: Tuning(flight_bytes=2**21, **{"decode_scores": 0} | sizes))


@cache
def compiled(impl, case, tuning="chunks that fill registers"):
    return jax.jit(partial(paged_attention, impl=impl, **case.options))


def on_tpu(*arrays, interpret, **options):
    return tpu.paged_attention(AttentionCall(*arrays, **options), interpret=interpret)


PIPELINED = {"step_keys": 512, "pipelined_scores": 2**20}
"""Sizes with which decodes are a pipeline over steps of two spans, see `tpu_decode`."""


def assert_close(got, want, dtype):
    tolerance = 2e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), atol=tolerance)


def lengths(case):
    """(query lengths, tokens cached before them) of up to `case.seqs` sequences that fit the batch."""
    room = case.pages * case.block_size
    longest = case.max_query_len or case.tokens

    @st.composite
    def draw(draw):
        queries, contexts, left = [], [], case.tokens
        for _ in range(draw(st.integers(0, case.seqs))):
            queries.append(draw(st.integers(0, min(longest, left))))
            contexts.append(draw(st.integers(0, room - queries[-1])))
            left -= queries[-1]
        return queries, contexts

    return draw()


@pytest.mark.parametrize(("impl", "case"), list(by_impl(CASES, ["reference", *IMPLS])))
def test_agrees_with_dense_attention(impl, case):
    agrees_with_dense_attention(case, compiled(impl, case))


@pytest.mark.parametrize(
    "name",
    [
        "llama heads",
        pytest.param("int8, soft cap and sinks, odd group", marks=pytest.mark.nightly),
        pytest.param("padded packed rows, bfloat16", marks=pytest.mark.nightly),
    ],
)
def test_chunks_of_less_than_whole_registers_agree_with_dense_attention(monkeypatch, name):
    tune(monkeypatch, step_keys=128, product_rows=16, tile_rows=32)
    agrees_with_dense_attention(CASES[name], compiled("tpu_interpret", CASES[name], "chunks of few rows"))


def agrees_with_dense_attention(case, attend):
    @settings(max_examples=examples(12), deadline=None)
    @given(lens=lengths(case), seed=st.integers(0, 1000))
    def check(lens, seed):
        batch = make_batch(case, *lens, seed=seed)
        got = attend(*batch.arrays)
        assert got.dtype == batch.q.dtype
        assert_close(got, dense_attention(case, batch), case.dtype)

    check()


SEEING = [
    *(("reference", 5), ("xla", None), ("xla", 5), ("cpu", None), ("cpu", 40)),
    *(pytest.param("tpu_interpret", window, marks=pytest.mark.nightly) for window in (None, 5)),
    ("tpu_interpret", 40),
]


@pytest.mark.parametrize(("impl", "window"), SEEING)
def test_queries_see_keys_behind_their_own_up_to_their_last(impl, window):
    case = Case(tokens=120, pages=14, q_per_kv=3, sliding_window=window)
    batch = make_batch(case, [1, 70, 20, 29], [30, 3, 100, 0])
    last = last_keys(case, batch, 12)
    want = dense_attention(case, batch, last)
    assert np.abs(want - dense_attention(case, batch)).max() > 0.1
    got = compiled(impl, case)(*batch.arrays, last_keys=last)
    assert_close(got, want, case.dtype)


@pytest.mark.parametrize("impl", ["reference", "xla", "cpu", "tpu_interpret"])
def test_queries_without_a_last_key_change_no_other_result_whether_single_or_of_a_prompt(impl):
    """What such a query gets is not read: the versions differ there, so only the others are compared."""
    case = Case(tokens=24, seqs=5, pages=8, q_per_kv=2)
    batch = make_batch(case, [1, 1, 13, 1, 8], [30, 3, 20, 0, 0])
    last = last_keys_of_images(case, batch, [[]] * 5)
    unread = np.array([1, 2, 9, 14, 16])
    last[unread] = -1
    read = np.setdiff1d(np.arange(24), unread)
    got = np.asarray(compiled(impl, case)(*batch.arrays, last_keys=last))
    assert_close(got[read], dense_attention(case, batch)[read], case.dtype)


IMAGE_CASES = {
    "llama heads": Case(q_per_kv=4, tokens=48),
    "a window shorter than an image, odd group": Case(q_per_kv=3, tokens=48, sliding_window=5),
    "two lane tiles, soft cap, sinks and window, bfloat16": Case(
        head_dim=256, tokens=48, dtype="bfloat16", soft_cap=5.0, sinks=True, sliding_window=40
    ),
    "int8, packed rows": Case(head_dim=48, tokens=48, block_size=32, pages=10, codes="int8"),
    "many queries of a head": Case(kv_heads=1, q_per_kv=40, tokens=48),
}


def cuts(queries):
    """Return where up to two images begin and end among so many queries: in the middle, side by side, at both ends."""
    most = 4 if queries > 1 else 0
    return st.lists(st.integers(0, queries), max_size=most).map(sorted)


@pytest.mark.parametrize(("impl", "case"), list(by_impl(IMAGE_CASES, ["xla", "tpu_interpret"])))
def test_tokens_of_images_see_all_of_their_image_and_text_beside_them_does_not(impl, case):
    @settings(max_examples=examples(10), deadline=None)
    @given(lens=lengths(case), data=st.data(), seed=st.integers(0, 1000))
    def check(lens, data, seed):
        batch = make_batch(case, *lens, seed=seed)
        last = last_keys_of_images(case, batch, [data.draw(cuts(n)) for n in lens[0]])
        got = compiled(impl, case)(*batch.arrays, last_keys=last)
        assert_close(got, dense_attention(case, batch, last), case.dtype)

    check()


@pytest.mark.nightly
def test_the_tpu_kernel_has_no_race_where_tokens_see_images():
    case = Case(kv_heads=1, tokens=48, sliding_window=20)
    batch = make_batch(case, [40, 1, 7], [250, 30, 0])
    last = last_keys_of_images(case, batch, [[3, 20, 21, 40], [], [0, 7]])
    arrays = (*map(jnp.asarray, batch.arrays),)
    got, races = run_recording_races(on_tpu, *arrays, **case.options, last_keys=jnp.asarray(last))
    assert not races
    assert_close(got, dense_attention(case, batch, last), case.dtype)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        pytest.param({"product_rows": 64, "tile_rows": 64}, marks=pytest.mark.nightly),
        pytest.param({"product_rows": 1, "tile_rows": 1}, marks=pytest.mark.nightly),
    ],
)
def test_prompts_that_share_tiles_with_decodes_are_attended_to_whatever_the_tiles(monkeypatch, sizes):
    """Tiles of all rows, of one chunk, and of one row."""
    tune(monkeypatch, **sizes)
    case = Case(q_per_kv=3, tokens=57, seqs=9, pages=12, sliding_window=70)
    batch = make_batch(case, [1, 20, 1, 0, 2, 3, 1, 1, 22], [150, 33, 0, 9, 128, 170, 15, 16, 100])
    got = jax.jit(partial(paged_attention, impl="tpu_interpret", **case.options))(*batch.arrays)
    assert_close(got, dense_attention(case, batch), case.dtype)
    assert not np.asarray(got)[51:].any()


LENGTHS = {
    "prompts and decodes": [1, 20, 1, 33, 1],
    "prompts alone": [40, 17],
    "decodes alone": [1] * 21,
    "nothing": [0, 0],
    "a tile between prompts that has none": [2] + [1] * 40 + [9],
}


@pytest.mark.parametrize("codes", [None, pytest.param("int8", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("lengths", by_name(LENGTHS, "prompts and decodes"))
def test_rows_of_tiles_without_a_prompt_are_those_of_decodes_or_zero(lengths, codes):
    """Tiles of 16 rows; codes have two rows a query."""
    case = Case(q_per_kv=2 if codes else 3, tokens=107, seqs=len(lengths), block_size=32, pages=4, codes=codes)
    batch = make_batch(case, lengths, [37 * n % 50 for n in range(len(lengths))])
    got, races = run_recording_races(on_tpu, *map(jnp.asarray, batch.arrays), **case.options)
    assert not races
    assert_close(got, dense_attention(case, batch), case.dtype)
    assert not np.asarray(got, np.float32)[sum(lengths) :].any()


@pytest.mark.parametrize(
    "name", [rarely("llama heads"), "decode only", rarely("window shorter than a block, odd group")]
)
def test_block_tables_beyond_scalar_memory_change_no_bit(monkeypatch, name):
    case = CASES[name]
    batch = make_batch(case, [1, 1, 1, 1] if case.max_query_len else [5, 1, 3, 7], [140, 0, 37, 300])
    tables = batch.block_tables.copy()
    tables[0, 8] = NOWHERE
    arrays = (*map(jnp.asarray, (*batch.arrays[:3], tables, *batch.arrays[4:])),)
    want, _ = run_recording_races(on_tpu, *arrays, **case.options)
    monkeypatch.setattr(tpu_plan, "fit_whole", lambda *_: False)
    got, races = run_recording_races(on_tpu, *arrays, **case.options)
    assert not races
    assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


@pytest.mark.parametrize(("pages", "depth"), [(8192, 8), (24576, 4), (49152, 2)])
def test_a_ring_is_as_deep_as_the_tables_of_its_steps_fit_in_scalar_memory(pages, depth):
    assert tpu_ring.deepest_ring(pages) == depth
    assert tpu_ring.windows_for(depth) >= depth + 2


@pytest.mark.nightly
def test_a_plan_with_images_serves_all_layers_and_one_without_is_refused():
    case = Case(tokens=48)
    batch = make_batch(case, [40, 1, 7], [50, 30, 0])
    last = jnp.asarray(last_keys_of_images(case, batch, [[3, 20, 21, 40], [], [0, 7]]))
    q, view, layer, *where = map(jnp.asarray, batch.arrays)
    planned = partial(plan_attention, view, *where, tokens=48, q_per_kv=case.q_per_kv, impl="tpu_interpret")
    attend = partial(paged_attention, q, view, layer, *where, scale=1.0, last_keys=last, impl="tpu_interpret")
    assert np.asarray(attend(plan=planned(last_keys=last))).tobytes() == np.asarray(attend()).tobytes()
    with pytest.raises(ValueError, match="last_keys are given, but the plan was made without"):
        attend(plan=planned())


@pytest.mark.parametrize(
    "name", ["llama heads", "window shorter than a block, odd group", "sinks and a window, odd group"]
)
@pytest.mark.parametrize("impl", IMPLS)
def test_a_missing_block_is_masked_as_in_the_reference(impl, name):
    case = CASES[name]
    batch = make_batch(case, [5, 1, 3], [140, 200, 0])
    tables = batch.block_tables.copy()
    tables[0, [0, 8, 9]] = -1, case.blocks, NOWHERE  # the last ones are where the queries themselves are
    tables[2, 0] = -(2**31)  # nothing is left to see
    q, view, layer, _, starts, kv_lens = batch.arrays
    got = compiled(impl, case)(q, view, layer, tables, starts, kv_lens)
    want = compiled("reference", case)(q, view, layer, tables, starts, kv_lens)
    assert_close(got, want, case.dtype)
    assert not np.asarray(got)[6:9].any()


def test_sinks_leave_the_choice_of_kernel_alone(monkeypatch):
    taken = []
    monkeypatch.setattr(cpu, "paged_attention", lambda call: taken.append(call.sinks))
    case = CASES["decode only, sinks"]
    paged_attention(*make_batch(case, [1], [3]).arrays, **case.options, impl="cpu")
    np.testing.assert_array_equal(taken, [case.sink_logits])


@pytest.mark.parametrize("impl", ["reference", *IMPLS])
def test_a_sink_of_minus_infinity_takes_nothing_and_any_gives_nothing_to_a_query_that_sees_nothing(impl):
    case = Case(kv_heads=1, sinks=True)
    batch = make_batch(case, [1, 2], [30, 0])
    tables = batch.block_tables.copy()
    tables[1, 0] = NOWHERE
    q, view, layer, _, starts, kv_lens = batch.arrays
    sinks = np.array([[-np.inf, 2.0]], np.float32)
    attend = jax.jit(partial(paged_attention, impl=impl, scale=case.head_dim**-0.5))
    got = np.asarray(attend(q, view, layer, tables, starts, kv_lens, sinks=sinks))
    without = np.asarray(compiled("reference", replace(case, sinks=False))(q, view, layer, tables, starts, kv_lens))
    assert_close(got[:, :, 0], without[:, :, 0], case.dtype)
    assert np.abs(got[0, :, 1]).max() < np.abs(without[0, :, 1]).max()
    assert not got[1:3].any()


@pytest.mark.parametrize("impl", ["reference", *IMPLS])
def test_an_empty_batch_gives_zeros(impl):
    case = CASES["llama heads"]
    batch = make_batch(case, [], [])
    assert not np.asarray(compiled(impl, case)(*batch.arrays)).any()


@pytest.mark.parametrize("impl", ["reference", *IMPLS])
def test_a_prompt_in_chunks_gives_what_it_gives_at_once(impl):
    case = Case(tokens=24)
    whole = make_batch(case, [24], [100])
    at_once = compiled(impl, case)(*whole.arrays)
    starts = np.asarray([0, 10, 10, 10, 10], np.int32)
    kv_lens = np.asarray([110, 0, 0, 0], np.int32)
    first = compiled(impl, case)(whole.q, whole.view, whole.layer, whole.block_tables, starts, kv_lens)
    assert_close(first[:10], at_once[:10], case.dtype)
    assert not np.asarray(first)[10:].any()


DECODE = {"tokens": 4, "max_query_len": 1}
CPU_CASES = {
    "int8, decodes of small blocks": Case(
        codes="int8", tile=1, head_dim=64, block_size=8, pages=24, q_per_kv=3, **DECODE
    ),
    "int8, decodes, six queries of a head": Case(codes="int8", tile=1, q_per_kv=6, sliding_window=40, **DECODE),
    "int8, decodes, seven": Case(codes="int8", tile=1, q_per_kv=7, head_dim=64, **DECODE),
    "int8, decodes, two tiles as on a TPU": Case(
        codes="int8", head_dim=256, block_size=32, pages=10, sliding_window=5, **DECODE
    ),
    "int8, blocks that end within spans": Case(
        codes="int8", tile=1, head_dim=48, block_size=24, pages=14, q_per_kv=3, sliding_window=40
    ),
    "int8, three halves": Case(
        codes="int8", tile=1, head_dim=192, block_size=40, pages=8, q_per_kv=3, chunk_size=50, sinks=True
    ),
    "int8, large blocks": Case(codes="int8", tile=1, block_size=128, pages=3, q_per_kv=1, head_dim=256),
    "fp8, decodes": Case(codes="fp8", head_dim=256, block_size=24, pages=14, sliding_window=70, **DECODE),
    "fp8, packed rows": Case(codes="fp8", head_dim=64, block_size=8, pages=24, q_per_kv=3),
    "bfloat16, decodes": Case(codes="bf16", head_dim=192, block_size=24, pages=14, sinks=True, **DECODE),
    "bfloat16, packed rows": Case(codes="bf16", head_dim=64, block_size=64, pages=5, q_per_kv=3, sliding_window=40),
}
"""KV as engines hold it on a CPU, beside queries of float32."""


@pytest.mark.parametrize("case", CPU_CASES.values(), ids=CPU_CASES.keys())
def test_on_cpu_narrow_kv_agrees_with_dense_attention(case):
    test_agrees_with_dense_attention("cpu", case)


def test_on_cpu_a_missing_block_within_a_span_is_masked_in_narrow_kv():
    case = CPU_CASES["int8, blocks that end within spans"]
    batch = make_batch(replace(case, sliding_window=None), [1, 1, 7], [140, 200, 90])
    case, tables = replace(case, sliding_window=None), batch.block_tables.copy()
    tables[0, 1], tables[1, [0, 3]], tables[2, 2] = NOWHERE, -1, case.blocks
    q, view, layer, _, starts, kv_lens = batch.arrays
    arrays = q, view, layer, tables, starts, kv_lens
    assert_close(compiled("cpu", case)(*arrays), compiled("reference", case)(*arrays), case.dtype)


LIMITS = [{}, {"sliding_window": 5, "soft_cap": 5.0}, {"chunk_size": 70}, {"sinks": True}]
NARROW = [{"codes": codes, "tile": 1} for codes in ("int8", "fp8", "bf16")]
"""Forms of KV whose values are widened one way for few queries, and another for many."""


@pytest.mark.parametrize("limits", [*LIMITS, *NARROW])
def test_on_cpu_a_token_has_the_same_bits_in_a_chunk_and_alone(limits):
    case = Case(q_per_kv=3, tokens=40, **limits)
    chunk = make_batch(case, [37], [100])
    together = np.asarray(compiled("cpu", case)(*chunk.arrays))
    alone = replace(case, tokens=1, seqs=1, max_query_len=1)
    starts, table = np.asarray([0, 1], np.int32), chunk.block_tables[:1]
    for row in range(37):
        kv_lens = np.asarray([100 + row + 1], np.int32)
        q = chunk.q[row : row + 1]
        mine = compiled("cpu", alone)(q, chunk.view, chunk.layer, table, starts, kv_lens, *chunk.arrays[6:])
        np.testing.assert_array_equal(np.asarray(mine)[0], together[row])


@pytest.mark.parametrize("limits", [{}, {"sliding_window": 1500, "sinks": True}, *NARROW])
def test_on_cpu_splits_of_a_long_context_give_a_decode_the_bits_of_a_chunk(limits):
    case = Case(kv_heads=1, q_per_kv=3, head_dim=64, tokens=5, pages=160, seqs=1, **limits)
    chunk = make_batch(case, [5], [2555])
    together = np.asarray(compiled("cpu", case)(*chunk.arrays))
    assert_close(together, dense_attention(case, chunk), case.dtype)
    alone = replace(case, tokens=1, max_query_len=1)
    for row in range(5):
        arrays = (chunk.q[row : row + 1], *chunk.arrays[1:4], np.asarray([0, 1], np.int32))
        mine = compiled("cpu", alone)(*arrays, np.asarray([2555 + row + 1], np.int32))
        np.testing.assert_array_equal(np.asarray(mine)[0], together[row])


@pytest.mark.parametrize("impl", ["reference", *IMPLS])
def test_equal_block_tables_of_shared_prefixes_are_read_by_both(impl):
    case = Case(tokens=4, max_query_len=1)
    one = make_batch(case, [1], [90])
    tables = np.tile(one.block_tables[:1], (case.seqs, 1))
    q = np.tile(one.q[:1], (case.tokens, 1, 1, 1))
    starts = np.arange(case.seqs + 1, dtype=np.int32)
    kv_lens = np.full(case.seqs, 91, np.int32)
    got = np.asarray(compiled(impl, case)(q, one.view, one.layer, tables, starts, kv_lens))
    np.testing.assert_array_equal(got, np.tile(got[:1], (case.seqs, 1, 1, 1)))
    assert_close(got[:1], dense_attention(case, one)[:1], case.dtype)


def test_xla_joins_results_of_a_few_units_at_a_time_to_the_bits_of_all_at_once(monkeypatch):
    case = Case(tokens=5, seqs=4, pages=40, sinks=True)
    arrays = make_batch(case, [1, 1, 2, 1], [600, 0, 70, 330]).arrays
    at_once = compiled("xla", case)(*arrays)
    assert_close(at_once, compiled("reference", case)(*arrays), case.dtype)
    monkeypatch.setattr(xla, "_KEPT", 1)
    few = jax.jit(partial(paged_attention, impl="xla", **case.options))(*arrays)
    np.testing.assert_array_equal(few, at_once)


@pytest.mark.parametrize("name", ["llama heads", "two lane tiles, soft cap and window, bfloat16"])
def test_xla_takes_more_at_once_for_an_accelerator_and_agrees_with_dense_attention(name):
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    mesh, case = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device), CASES[name]
    batch = make_batch(case, [1, 1, 20, 1], [300, 40, 200, 5])
    with jax.sharding.use_abstract_mesh(mesh):
        assert xla._sizes().units > 32
        got = paged_attention(*map(jnp.asarray, batch.arrays), **case.options, impl="xla")
    assert_close(got, dense_attention(case, batch), case.dtype)


def test_memory_of_decodes_by_xla_does_not_grow_with_block_tables():
    """Two tables of two million keys: results of all their units would take 32 MiB."""
    of, pages = jax.ShapeDtypeStruct, 2**17
    q, view = of((2, 1, 1, 64), jnp.float32), of(view_shape(4, 1, 1, 64, 16), jnp.float32)
    where = of((2, pages), jnp.int32), of((3,), jnp.int32), of((2,), jnp.int32)
    attend = jax.jit(partial(paged_attention, scale=1.0, max_query_len=1, impl="xla"))
    memory = attend.lower(q, view, 0, *where).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2**20


RACE_CASES = {
    "ragged, several steps": (Case(kv_heads=1), [3, 0, 1, 20], [290, 10, 0, 150]),
    "decode, window, bfloat16": (
        Case(tokens=4, max_query_len=1, sliding_window=150, dtype="bfloat16", head_dim=64),
        [1, 1, 1, 1],
        [300, 0, 20, 200],
    ),
    "many short sequences": (Case(tokens=12, seqs=12, pages=2, kv_heads=1), [1] * 12, list(range(12))),
    "sinks, two chunks of queries": (Case(q_per_kv=8, tokens=40, sinks=True), [30, 1], [110, 150]),
    "nothing": (Case(), [], []),
}


@pytest.mark.parametrize(("case", "queries", "contexts"), by_name(RACE_CASES, "ragged, several steps", "nothing"))
def test_the_tpu_kernel_has_no_race(case, queries, contexts):
    batch = make_batch(case, queries, contexts)
    got, races = run_recording_races(on_tpu, *map(jnp.asarray, batch.arrays), **case.options)
    assert not races
    assert_close(got, dense_attention(case, batch), case.dtype)


def test_the_pipeline_of_decodes_has_no_race_and_reads_no_memory_that_was_never_written(monkeypatch):
    """Sequences of few keys, of most of a step, of two steps; what is beyond their last keys is NaN, and so are all
    values of the first one, whose place in VMEM the last one's step gets."""
    tune(monkeypatch, **PIPELINED)
    case = Case(kv_heads=1, tokens=5, seqs=5, pages=40, max_query_len=1, layers=1)
    batch = make_batch(case, [1] * 5, [300, 0, 600, 600, 90])
    batch.view[batch.block_tables[0, :19], :, :, 1] = np.nan
    got, races = run_recording_races(on_tpu, *map(jnp.asarray, batch.arrays), **case.options)
    assert not races and np.isnan(got[0]).all()
    assert_close(got[1:], dense_attention(case, batch)[1:], case.dtype)


class Launched(Exception):
    """Holds the arguments of a launch instead of making it."""


ONE_HEAD = Case(kv_heads=1, tokens=32, seqs=32, pages=64, max_query_len=1, layers=1)
RINGS = {
    "whole steps": (ONE_HEAD, "attend_to_rows", (6, 32)),
    "a window of nine blocks": (replace(ONE_HEAD, sliding_window=128), "attend_to_rows", (6, 16)),
    "a window of more keys than a span": (replace(ONE_HEAD, sliding_window=300), "attend_to_rows", (6, 32)),
    "small steps": (replace(ONE_HEAD, sliding_window=5, head_dim=64, dtype="bfloat16"), "attend_to_rows", (24, 8)),
    "tables of which two fit": (replace(ONE_HEAD, pages=30_000), "attend_to_units", (2, 32)),
}


@pytest.mark.parametrize(("case", "body", "ring"), by_name(RINGS, *RINGS))
def test_a_pipeline_holds_whole_windows_and_more_steps_than_it_computes(monkeypatch, case, body, ring):
    """(steps, pages of one) of a decode's ring. Where scalar memory has room for few block tables there is no pipeline,
    which computes three steps at once."""
    tune(monkeypatch, **PIPELINED)

    def launch(kernel, *_, grid_spec, **__):
        raise Launched(kernel.func.__name__, grid_spec.scratch_shapes[0].shape[:2])

    monkeypatch.setattr(tpu.pl, "pallas_call", launch)
    q, view, layer, _, *where = make_batch(replace(case, pages=1), [], []).arrays
    with pytest.raises(Launched) as launched:
        on_tpu(q, view, layer, jnp.zeros((32, case.pages), jnp.int32), *where, interpret=False, **case.options)
    assert launched.value.args == (body, ring)


PLAIN_CASES = {
    "one head": Case(kv_heads=1, q_per_kv=4, tokens=4, max_query_len=1, pages=80, layers=1),
    "two lane tiles, window, bfloat16": Case(
        head_dim=256, tokens=4, max_query_len=1, pages=80, layers=1, sliding_window=1100, dtype="bfloat16"
    ),
    "int8": Case(codes="int8", block_size=128, tokens=4, max_query_len=1, pages=10, layers=1),
    "int8, small blocks, two lane tiles": Case(
        codes="int8", block_size=32, kv_heads=1, head_dim=256, tokens=4, max_query_len=1, pages=40, layers=1
    ),
    "fp8": Case(codes="fp8", block_size=64, tokens=4, max_query_len=1, pages=20, layers=1),
    "blocks of 128, packed rows": Case(block_size=128, head_dim=64, tokens=4, max_query_len=1, pages=10, layers=1),
}
COMMON = ("one head", "int8", "blocks of 128, packed rows")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if name in COMMON else pytest.mark.nightly)
        for name, case in PLAIN_CASES.items()
    ],
)
def test_steps_of_several_spans_that_need_no_mask(monkeypatch, case):
    """Steps of 512 keys in spans of 256; 1280 keys are two such steps, and half a one."""
    tune(monkeypatch, step_keys=512)
    batch = make_batch(case, [1, 1, 1, 1], [1279, 1279, 1023, 1200])
    got, races = run_recording_races(on_tpu, *map(jnp.asarray, batch.arrays), **case.options)
    assert not races
    assert_close(got, dense_attention(case, batch), case.dtype)


@pytest.mark.parametrize(
    ("codes", "pipelined_scores"),
    [(None, 0), (None, 2**20), *(pytest.param("int8", most, marks=pytest.mark.nightly) for most in (0, 2**20))],
)
def test_a_decode_has_the_same_bits_whatever_its_batch_on_tpu(monkeypatch, codes, pipelined_scores):
    """A whole step that all keys are seen of is masked where the next step to fetch is a part of one."""
    tune(monkeypatch, step_keys=768, pipelined_scores=pipelined_scores)
    case = Case(codes=codes, block_size=128, kv_heads=1, tokens=4, max_query_len=1, pages=14, layers=1)
    lengths = [767, 1535, 300, 1200]
    batch = make_batch(case, [1] * 4, lengths)
    assert_close(
        compiled("tpu_interpret", case, f"768, {pipelined_scores}")(*batch.arrays),
        dense_attention(case, batch),
        case.dtype,
    )
    q, view, layer, tables, starts, kv_lens = batch.arrays
    attend = compiled("tpu_interpret", case, f"768, {pipelined_scores}")
    together, backwards = attend(*batch.arrays), attend(q[::-1], view, layer, tables[::-1], starts, kv_lens[::-1])
    np.testing.assert_array_equal(together, backwards[::-1])
    for row in range(4):
        only = np.where(np.arange(4) == row, kv_lens, 0)
        np.testing.assert_array_equal(attend(q, view, layer, tables, starts, only)[row], together[row])


@pytest.mark.nightly
def test_the_steps_of_a_chip_agree_with_dense_attention_at_every_size_that_a_part_has(monkeypatch):
    """A step of one head has 4,096 keys there: 4, 8, 12 or 16 spans."""
    monkeypatch.setattr(tpu_plan, "tuning_of", lambda *_: Tuning())
    lengths = [0, 700, 2100, 3200, 4095, 4200]
    case = Case(dtype="bfloat16", block_size=128, kv_heads=1, tokens=8, seqs=6, max_query_len=1, pages=33, layers=1)
    batch = make_batch(case, [1] * len(lengths), lengths)
    assert_close(compiled("tpu_interpret", case, "chip")(*batch.arrays), dense_attention(case, batch), case.dtype)


def test_the_tpu_kernel_takes_heads_in_chunks(monkeypatch):
    monkeypatch.setattr(tpu, "MAX_HEADS", 2)
    case = Case(kv_heads=6, head_dim=64)
    batch = make_batch(case, [4, 1], [150, 20])
    got, races = run_recording_races(on_tpu, *map(jnp.asarray, batch.arrays), **case.options)
    assert not races
    assert_close(got, dense_attention(case, batch), case.dtype)


def test_the_tpu_kernel_refuses_blocks_that_split_a_memory_tile():
    case = Case(block_size=8, dtype="bfloat16")
    batch = make_batch(case, [1], [3])
    with pytest.raises(ValueError, match="block_size=8"):
        paged_attention(*map(jnp.asarray, batch.arrays), **case.options, impl="tpu_interpret")


@pytest.mark.parametrize("impl", ["reference", *IMPLS])
def test_a_view_of_other_heads_is_refused(impl):
    batch = make_batch(Case(head_dim=128), [1], [3])
    with pytest.raises(ValueError, match="head_dim=64"):
        paged_attention(batch.q[..., :64], *batch.arrays[1:], scale=1.0, impl=impl)


def test_the_tpu_kernel_refuses_block_tables_of_which_a_few_are_beyond_scalar_memory():
    batch = make_batch(Case(), [1], [3])
    q, view, layer, _, starts, kv_lens = map(jnp.asarray, batch.arrays)
    tables = jnp.zeros((4, tpu_ring.TABLE_BYTES // 16 + 1), jnp.int32)
    with pytest.raises(ValueError, match=f"block tables of 49153 pages.* more than {tpu_ring.TABLE_BYTES}"):
        paged_attention(q, view, layer, tables, starts, kv_lens, scale=1.0, impl="tpu")


@pytest.mark.parametrize("name", [rarely("llama heads"), "decode only"])
def test_a_plan_serves_all_layers_and_changes_no_bit(name):
    case = CASES[name]
    batch = make_batch(case, [1, 1, 1], [140, 0, 37])
    q, view, _, *where = map(jnp.asarray, batch.arrays)
    limits = {"max_query_len": case.max_query_len, "impl": "tpu_interpret"}
    plan = plan_attention(view, *where, tokens=case.tokens, q_per_kv=case.q_per_kv, **limits)
    attend = jax.jit(partial(paged_attention, scale=1.0, **limits))
    for layer in range(case.layers):
        planned, alone = (np.asarray(attend(q, view, layer, *where, plan=given)) for given in (plan, None))
        assert planned.tobytes() == alone.tobytes()  # memory of other layers holds NaN


def test_implementations_that_plan_nothing_refuse_a_plan():
    case = CASES["llama heads"]
    q, view, layer, *where = map(jnp.asarray, make_batch(case, [5], [3]).arrays)
    shapes = {"tokens": case.tokens, "q_per_kv": case.q_per_kv}
    assert plan_attention(view, *where, **shapes, impl="xla") is None
    plan = plan_attention(view, *where, **shapes, impl="tpu")
    with pytest.raises(ValueError, match="impl='xla' takes no plan"):
        paged_attention(q, view, layer, *where, scale=1.0, plan=plan, impl="xla")


def test_heads_that_are_too_wide_for_the_gpu_kernels_are_attended_to_as_xla_does():
    """Gemma 4's global layers have heads of 512."""
    case = Case(head_dim=512, kv_heads=1, q_per_kv=2)
    batch = make_batch(case, [5, 1, 3], [40, 20, 0])
    assert_close(compiled("gpu", case)(*batch.arrays), dense_attention(case, batch), case.dtype)


DECODES = {
    "one head": Case(kv_heads=1, q_per_kv=4, **DECODE),
    "eight heads, bfloat16": Case(kv_heads=8, dtype="bfloat16", **DECODE),
    "packed rows, sinks": Case(head_dim=64, sinks=True, **DECODE),
    "two lane tiles, window, bfloat16": Case(head_dim=256, dtype="bfloat16", sliding_window=40, **DECODE),
    "chunks": Case(chunk_size=50, **DECODE),
    "int8": Case(codes="int8", block_size=128, pages=4, **DECODE),
    "int8, small blocks, packed rows": Case(codes="int8", block_size=32, head_dim=64, pages=10, kv_heads=1, **DECODE),
    "fp8": Case(codes="fp8", block_size=32, pages=10, **DECODE),
}
NEW_LENGTHS = [0, 31, 130]
"""Tokens before the new one: none, those of a block but one, and several steps. The last row is padding."""


def decode_with_new(case, lengths):
    """Arguments of `write_and_attend` without options."""
    batch = make_batch(case, [1] * len(lengths), lengths)
    q, view, layer, *where = map(jnp.asarray, batch.arrays)
    k, v = np.random.default_rng(1).normal(size=(2, len(q), case.kv_heads, case.head_dim))
    return q, jnp.nan_to_num(view), layer, jnp.asarray(k, q.dtype), jnp.asarray(v, q.dtype), *where


def options_of(case):
    return {name: value for name, value in case.options.items() if name != "max_query_len"}


def apart(q, view, layer, k, v, tables, starts, lens, *, impl, **options):
    """`kv_write`, then `paged_attention`."""
    size, last = tokens_of(view), lens - 1
    slots = tables[jnp.arange(len(tables)), last // size] * size + last % size
    slots = jnp.where(jnp.diff(starts) > 0, slots, -1)  # row u of the batch is sequence u
    view = kv_write(view, layer, k, v, slots, impl=impl)
    return view, paged_attention(q, view, layer, tables, starts, lens, max_query_len=1, impl=impl, **options)


def same_bits(found, wanted):
    for got, want in zip(found, wanted, strict=True):
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


@pytest.mark.parametrize("pipelined_scores", [0, pytest.param(2**20, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("case", by_name(DECODES))
def test_a_launch_that_writes_and_attends_gives_the_bits_of_two(monkeypatch, case, pipelined_scores):
    tune(monkeypatch, step_keys=128, pipelined_scores=pipelined_scores)
    arrays, impl = decode_with_new(case, NEW_LENGTHS), "tpu_interpret"
    found = jax.jit(partial(write_and_attend, **options_of(case), impl=impl))(*arrays)
    same_bits(found, jax.jit(partial(apart, **options_of(case), impl=impl))(*arrays))
    view, out = jax.jit(partial(apart, **options_of(case), impl="reference"))(*arrays)
    same_bits(found[:1], [view])
    assert_close(found[1], out, case.dtype)


def fused(q, view, layer, k, v, *where, interpret, **options):
    call = AttentionCall(q, view, layer, *where, max_query_len=1, **options)
    return tpu.paged_attention(call, new=pack_kv(k, v), interpret=interpret)[::-1]


@pytest.mark.parametrize(("tokens", "heads"), [(20, 1), rarely(100, 1), (48, 3)])
def test_a_pipeline_is_lowered_for_any_number_of_sequences_and_heads(monkeypatch, tokens, heads):
    tune(monkeypatch, step_keys=128, pipelined_scores=2**20)
    bf16, of = jnp.bfloat16, jax.ShapeDtypeStruct
    rows, view = of((tokens, heads, 128), bf16), of(view_shape(64, 2, heads, 128, 16, "bfloat16"), bf16)
    where = of((tokens, 8), jnp.int32), of((tokens + 1,), jnp.int32), of((tokens,), jnp.int32)
    traced = jax.jit(partial(write_and_attend, scale=1.0, impl="tpu")).trace(
        of((tokens, heads, 4, 128), bf16), view, of((), jnp.int32), rows, rows, *where
    )
    assert "paged_attention_decode" in traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.nightly
def test_each_of_more_rows_than_a_memory_tile_has_is_written(monkeypatch):
    """A block of the batch is whole memory tiles of new rows, of 16 each."""
    tune(monkeypatch, step_keys=128, pipelined_scores=2**20)
    case = Case(kv_heads=1, q_per_kv=1, tokens=24, seqs=24, pages=1, max_query_len=1, layers=1, dtype="bfloat16")
    arrays = decode_with_new(case, [number % 16 for number in range(24)])
    found = jax.jit(partial(write_and_attend, **options_of(case), impl="tpu_interpret"))(*arrays)
    view, out = jax.jit(partial(apart, **options_of(case), impl="reference"))(*arrays)
    same_bits(found[:1], [view])
    assert_close(found[1], out, case.dtype)


FEW_PLACES = Case(kv_heads=1, q_per_kv=1, tokens=5, seqs=5, pages=3, max_query_len=1, layers=1)
"""More sequences than there are tiles on their way at once."""


@pytest.mark.parametrize("places", [2, pytest.param(8, marks=pytest.mark.nightly)])
def test_a_launch_that_writes_and_attends_has_no_race(monkeypatch, places):
    if places == 8:
        tune(monkeypatch, **PIPELINED)
    monkeypatch.setattr(tpu, "IN_FLIGHT", places)
    monkeypatch.setattr(tpu_new_rows, "IN_FLIGHT", places)
    arrays = decode_with_new(FEW_PLACES, [40, 15, 16, 0, 33])
    found, races = run_recording_races(fused, *arrays, **options_of(FEW_PLACES))
    assert not races
    same_bits(found, apart(*arrays, **options_of(FEW_PLACES), impl="tpu_interpret"))


@pytest.mark.nightly
def test_without_a_wait_a_tile_on_its_way_would_be_overwritten(monkeypatch):
    monkeypatch.setattr(tpu, "IN_FLIGHT", 1)
    monkeypatch.setattr(tpu_new_rows, "IN_FLIGHT", 1)

    def wait_for_all(self):
        for _ in range(3):
            self._each_copy(0, 0, 0, lambda copy: copy.wait())

    monkeypatch.setattr(tpu_new_rows.NewRows, "wait", lambda *_: None)
    monkeypatch.setattr(tpu_new_rows.NewRows, "drain", wait_for_all)
    _, races = run_recording_races(fused, *decode_with_new(FEW_PLACES, [40, 15, 16]), **options_of(FEW_PLACES))
    assert races


@pytest.mark.nightly
def test_a_sequence_whose_last_block_is_missing_writes_nothing():
    case = Case(kv_heads=1, pages=4, **DECODE)
    q, view, layer, k, v, tables, *where = decode_with_new(case, [5, 20])
    tables = tables.at[1, 1].set(NOWHERE)
    attend = jax.jit(partial(write_and_attend, **options_of(case), impl="tpu_interpret"))
    got, _ = attend(q, view, layer, k, v, tables, *where)
    changed = np.argwhere((np.asarray(got) != np.asarray(view)).any(axis=(2, 3, 5)))
    assert changed.tolist() == [[int(tables[0, 0]), int(layer), 5]]


def test_versions_that_write_apart_refuse_to_write_and_attend():
    with pytest.raises(ValueError, match="impl='xla' does not write and attend in one launch: call kv_write"):
        write_and_attend(*decode_with_new(Case(**DECODE), [5]), scale=1.0, impl="xla")


def test_new_rows_are_refused_where_prompts_may_be():
    case = Case(tokens=4)
    q, view, layer, k, v, *where = decode_with_new(case, [5, 20])
    with pytest.raises(ValueError, match="new rows are taken with max_query_len=1 only"):
        tpu.paged_attention(AttentionCall(q, view, layer, *where, 1.0), new=pack_kv(k, v), interpret=True)
