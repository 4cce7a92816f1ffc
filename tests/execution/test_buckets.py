"""Which shapes are compiled, and which one a step gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.execution import Bucket, Buckets


def test_decode_buckets_double_to_16_and_then_go_by_halves_to_max_num_seqs():
    assert [b.tokens for b in Buckets(max_num_seqs=8, max_num_batched_tokens=512).decode] == [1, 2, 4, 8]
    assert [b.tokens for b in Buckets(max_num_seqs=100, max_num_batched_tokens=512).decode][-4:] == [48, 64, 96, 100]
    buckets = Buckets(max_num_seqs=48, max_num_batched_tokens=512)
    assert [b.tokens for b in buckets.decode] == [1, 2, 4, 8, 16, 24, 32, 48]
    assert all(b.seqs == b.tokens and b.decode_only for b in buckets.decode)


def test_mixed_buckets_are_eighths_of_the_budget_at_least_64_apart():
    assert [b.tokens for b in Buckets(max_num_seqs=8, max_num_batched_tokens=512).mixed] == list(range(64, 513, 64))
    assert [b.tokens for b in Buckets(max_num_seqs=8, max_num_batched_tokens=100).mixed] == [64, 100]
    assert len(Buckets(max_num_seqs=8, max_num_batched_tokens=8192).mixed) == 8


def test_the_sampler_has_as_many_rows_as_it_needs_within_a_factor_of_four_and_of_two_above_four():
    buckets = Buckets(max_num_seqs=100, max_num_batched_tokens=512)
    assert buckets.sample_rows == (1, 4, 8, 16, 32, 64, 100)
    assert [buckets.samples_holding(n)[0] for n in (0, 1, 2, 4, 5, 9, 17, 33, 65)] == [1, 1, 4, 4, 8, 16, 32, 64, 100]
    assert Buckets(max_num_seqs=1, max_num_batched_tokens=1).sample_rows == (1,)


def test_one_sequence_and_one_token_have_buckets():
    buckets = Buckets(max_num_seqs=1, max_num_batched_tokens=1)
    assert buckets.all == (Bucket(1, 1, True), Bucket(1, 1, False))


@given(st.integers(1, 300), st.integers(0, 3000), st.data())
def test_every_step_within_the_limits_has_the_smallest_bucket_that_holds_it(max_num_seqs, more, data):
    buckets = Buckets(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs + more)
    seqs = data.draw(st.integers(1, max_num_seqs))
    tokens = data.draw(st.integers(seqs, max_num_seqs + more))
    bucket = buckets.smallest(tokens=tokens, seqs=seqs)
    assert bucket in buckets.all
    assert bucket.tokens >= tokens and bucket.seqs >= seqs
    assert bucket.decode_only == (tokens == seqs)
    same_kind = buckets.decode if bucket.decode_only else buckets.mixed
    assert not any(b.tokens < bucket.tokens and b.tokens >= tokens for b in same_kind)
    assert len(set(buckets.all)) == len(buckets.all)


def test_a_step_above_the_limits_is_refused():
    buckets = Buckets(max_num_seqs=4, max_num_batched_tokens=64)
    with pytest.raises(ValueError, match="65 tokens of 2 sequences is above the largest bucket: 64 tokens of 4"):
        buckets.smallest(tokens=65, seqs=2)
    with pytest.raises(ValueError, match="5 sequences"):
        buckets.smallest(tokens=5, seqs=5)


def test_steps_of_several_replicas_run_in_a_bucket_that_holds_each():
    buckets = Buckets(max_num_seqs=8, max_num_batched_tokens=256)
    assert buckets.common([(3, 3), (0, 0), (5, 5)]) == Bucket(8, 8, True)
    assert buckets.common([(5, 5), (5, 3)]) == Bucket(64, 8, False), "a prompt among them: nobody is decode-only"
    assert buckets.common([(70, 2), (8, 8)]) == Bucket(128, 8, False)


@given(st.integers(1, 100), st.integers(0, 1000), st.booleans(), st.booleans(), st.data())
def test_larger_buckets_hold_what_a_bucket_holds_and_the_largest_holds_all(max_num_seqs, more, images, adapters, data):
    buckets = Buckets(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs + more, images=images, adapters=adapters
    )
    bucket = data.draw(st.sampled_from(buckets.all))
    larger = list(buckets.holding(bucket))
    assert larger[0] == bucket and larger[-1] in buckets.largest and set(larger) <= set(buckets.all)
    assert len(set(larger)) == len(larger)
    assert [other.tokens for other in larger] == sorted(other.tokens for other in larger), "the least padding first"
    for other in larger:
        assert other.tokens >= bucket.tokens and other.seqs >= bucket.seqs
        assert (other.images, other.adapters) == (bucket.images, bucket.adapters)
        assert bucket.decode_only or not other.decode_only, "prompts need a mixed step"
