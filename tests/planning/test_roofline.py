"""Bounds on speed, against figures counted by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from jpaged.planning.roofline import Speed, Work, decode_seconds, experts_of_a_token, prefill_seconds

WORK = Work(
    weight_bytes=1000,
    expert_bytes=0,
    experts=0,
    experts_per_token=1,
    flops_per_token=1000,
    head_flops=200,
    attention_flops=2,
    kv_bytes=4,
    windows=((1.0, None),),
    reduced_bytes=16,
    devices=1,
)
SLOW_MEMORY, SLOW_UNITS = Speed(10, 1e9, 1e9), Speed(1e9, 10, 1e9)


def test_a_decode_step_reads_the_weights_once_and_each_sequences_kv():
    assert decode_seconds(WORK, SLOW_MEMORY, sequences=3, length=50) == pytest.approx((1000 + 3 * 50 * 4) / 10)


def test_a_step_computes_the_products_of_every_token_and_its_attention():
    assert decode_seconds(WORK, SLOW_UNITS, sequences=3, length=50) == pytest.approx(3 * (1200 + 50 * 2) / 10)


def test_a_step_of_a_prompt_computes_the_logits_of_one_token_only():
    assert prefill_seconds(WORK, SLOW_UNITS, tokens=8, length=50) == pytest.approx((8 * (1000 + 25 * 2) + 200) / 10)


def test_layers_with_a_window_read_no_more_than_it():
    work = replace(WORK, windows=((0.25, None), (0.75, 10)))
    assert work.seen(50) == 0.25 * 50 + 0.75 * 10
    assert work.seen(5) == 5


def test_of_the_experts_only_those_that_tokens_meet_are_read():
    work = replace(WORK, expert_bytes=800, experts=8, experts_per_token=2)
    assert work.read_bytes(1) == pytest.approx(1000 + 200)
    assert work.read_bytes(2) == pytest.approx(1000 + 800 * (1 - 0.75**2))
    assert work.read_bytes(1000) == pytest.approx(1800)


@pytest.mark.parametrize(
    ("fields", "experts"),
    [
        ({"num_experts_per_tok": 8}, 8),
        ({"top_k_experts": 8}, 8),  # Gemma 4
        ({"moe_topk": [8, 8]}, 8),  # Hunyuan
        ({"moe_k": 6}, 6),  # ERNIE 4.5
        ({"num_experts_per_tok": None}, None),
        ({}, None),
    ],
)
def test_the_experts_of_a_token_are_known_by_the_names_of_all_families(fields, experts):
    text = SimpleNamespace(**fields)
    assert experts_of_a_token(SimpleNamespace(get_text_config=lambda: text)) == experts


def test_a_ring_of_devices_sends_every_reduced_byte_nearly_twice():
    work = replace(WORK, devices=4)
    alone = decode_seconds(WORK, Speed(1e9, 1e9, 8), sequences=3, length=0)
    assert decode_seconds(work, Speed(1e9, 1e9, 8), sequences=3, length=0) - alone == pytest.approx(1.5 * 3 * 16 / 8)
