import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_schedulers import group, make_request, make_scheduler
from thorough import examples

from jpaged.config import EngineConfig
from jpaged.engine.sizes import DEFAULTS, GIB, longest_sequence, pool_tokens, sized

LARGE = 75 * GIB


def sizes(config):
    return config.block_size, config.max_num_seqs, config.max_num_batched_tokens


@pytest.mark.parametrize(
    ("platform", "memory", "expected"),
    [
        ("cpu", 0, (16, 64, 512)),
        ("gpu", 14 * GIB, (16, 128, 2048)),
        ("gpu", 21 * GIB, (16, 256, 4096)),
        ("gpu", LARGE, (16, 256, 8192)),
        ("tpu", 15 * GIB, (128, 128, 1024)),
        ("tpu", 31 * GIB, (128, 256, 2048)),
        ("metal", 16 * GIB, (16, 128, 2048)),
    ],
)
def test_open_sizes_follow_the_device_and_its_memory(platform, memory, expected):
    assert sizes(sized(EngineConfig(model="m"), platform, memory)) == expected


def test_what_the_user_asked_for_stays():
    asked = EngineConfig(model="m", block_size=32, max_num_seqs=7, max_num_batched_tokens=99, seed=5)
    made = sized(asked, "gpu", LARGE)
    assert sizes(made) == (32, 7, 99) and made.seed == 5


def test_one_size_that_was_asked_for_bounds_the_other():
    assert sizes(sized(EngineConfig(model="m", max_num_seqs=1000), "cpu", 0)) == (16, 1000, 1000)
    assert sizes(sized(EngineConfig(model="m", max_num_batched_tokens=8), "cpu", 0)) == (16, 8, 8)


def test_settings_that_do_not_fit_the_default_are_refused_by_name():
    with pytest.raises(ValueError, match="state_checkpoint_interval=48 is not a multiple of block_size=128"):
        sized(EngineConfig(model="m", state_checkpoint_interval=48), "tpu", LARGE)


@given(
    st.sampled_from(sorted(DEFAULTS)),
    st.integers(0, 300 * GIB),
    st.none() | st.integers(1, 9000),
    st.none() | st.integers(1, 9000),
)
def test_any_device_gives_a_step_room_for_a_token_of_each_sequence(platform, memory, sequences, tokens):
    if sequences is not None and tokens is not None and tokens < sequences:
        sequences, tokens = tokens, sequences
    made = sized(EngineConfig(model="m", max_num_seqs=sequences, max_num_batched_tokens=tokens), platform, memory)
    assert made.max_num_seqs <= made.max_num_batched_tokens
    assert sequences in (None, made.max_num_seqs) and tokens in (None, made.max_num_batched_tokens)


# The longest sequence a pool takes, and how many tokens it holds.


def memory(num_blocks, **options):
    return make_scheduler(num_blocks=num_blocks, **options).memory


def test_a_pool_of_full_attention_holds_its_blocks():
    assert longest_sequence(memory(10), 100) == 40
    assert longest_sequence(memory(10), 30) == 30
    assert pool_tokens(memory(10), 40) == 40
    assert pool_tokens(memory(10), 20) == 40


def test_the_watermark_is_not_counted_on():
    assert longest_sequence(memory(10, watermark=0.1), 100) == 36


def test_a_window_holds_longer_sequences():
    windowed = memory(10, groups=[group(window=8)], budget=8)
    assert longest_sequence(windowed, 1000) == 1000


def test_a_pool_without_room_for_a_token_says_so():
    assert longest_sequence(memory(1, watermark=0.99), 100) == 4


@settings(max_examples=examples(100), deadline=None)
@given(
    num_blocks=st.integers(1, 40),
    window=st.integers(1, 30),
    watermark=st.sampled_from([0.0, 0.1, 0.3]),
    outputs=st.integers(1, 3),
)
def test_what_is_said_is_what_add_accepts(num_blocks, window, watermark, outputs):
    """Tokens of prompt and output; a single output token is drawn and never computed, so that it takes no memory."""
    groups = [group(), group("window", window=window)]
    scheduler = make_scheduler(groups=groups, num_blocks=num_blocks, watermark=watermark, budget=32)
    longest = longest_sequence(scheduler.memory, 200)
    most = longest if outputs == 1 else longest - outputs
    if most > 0:
        scheduler.add(make_request(most, outputs))
    if longest < 200:
        with pytest.raises(ValueError, match="raise kv_cache_memory_bytes or memory_utilization, or lower max_tokens"):
            scheduler.add(make_request(max(most, 0) + 1, outputs))
