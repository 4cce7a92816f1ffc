"""Gemma 4's metadata: what a file says layer by layer is read where a config can say it, and else refused."""

import numpy as np
import pytest
from gguf_files import write_gguf

from jpaged.loading.gguf.config import config_from_gguf
from jpaged.loading.gguf.reader import GGUFFile

LAYERS = 4
KEYS = {
    "block_count": LAYERS,
    "attention.key_length": 32,
    "attention.key_length_swa": 16,
    "attention.sliding_window": 7,
    "attention.sliding_window_pattern": [True, False] * 2,
    "rope.freq_base": 1e6,
}
TENSORS = {"token_embd.weight": np.zeros((43, 64), np.float32)} | {
    f"blk.{n}.attn_v.weight": np.zeros((1, 1), np.float32) for n in range(LAYERS)
}
FREQUENCIES = np.array([1.0] * 4 + [1e30] * 12, np.float32)


def read(folder, *, without=(), frequencies=FREQUENCIES, more=(), **changes):
    tensors = {name: array for name, array in TENSORS.items() if name not in without}
    tensors |= {name: np.zeros(1, np.float32) for name in more}
    if frequencies is not None:
        tensors["rope_freqs.weight"] = np.asarray(frequencies, np.float32)
    keys = {key.replace(".", "__"): value for key, value in KEYS.items()} | changes
    return config_from_gguf(GGUFFile(write_gguf(folder / "m.gguf", "gemma4", tensors, **keys)))


def test_heads_widths_and_rotation_are_those_of_each_layer(tmp_path):
    found = read(
        tmp_path,
        attention__head_count_kv=[2, 1, 2, 1],
        attention__shared_kv_layers=2,
        feed_forward_length=[96, 96, 192, 192],
        rope__freq_base_swa=5e3,
    )
    by_layer = [found.per_layer_config[number] for number in range(LAYERS)]
    assert [own.head_dim for own in by_layer] == [16, 32] * 2
    assert [own.num_key_value_heads for own in by_layer] == [2, 1] * 2
    assert (found.num_kv_shared_layers, found.use_double_wide_mlp, found.intermediate_size) == (2, True, 96)
    assert found.rope_parameters == {
        "sliding_attention": {"rope_theta": 5e3, "rope_type": "default"},
        "full_attention": {"rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": 0.25},
    }
    assert not found.attention_k_eq_v and not found.hidden_size_per_layer_input and not found.enable_moe_block


def test_global_layers_without_values_use_their_keys(tmp_path):
    assert read(tmp_path, without=("blk.1.attn_v.weight", "blk.3.attn_v.weight")).attention_k_eq_v


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"more": ["blk.0.ffn_gate_up_exps.scale"]}, r"1 tensors of gemma4 are not supported.*ffn_gate_up_exps\.scale"),
        ({"more": ["v.blk.0.attn_q.weight"]}, r"not supported, first: v\.blk\.0\.attn_q\.weight"),
        ({"without": ("blk.0.attn_v.weight",)}, r"layers \[0\] have no attn_v\.weight"),
        ({"frequencies": None}, r"no tensor rope_freqs\.weight"),
        ({"frequencies": np.linspace(1, 8, 16)}, r"rope_freqs\.weight is not ones and"),
        ({"frequencies": [1.0, 1e30, 1.0, 1e30] * 4}, r"rope_freqs\.weight is not ones and"),
        ({"attention__sliding_window_pattern": [True] * 4}, "must say of each of 4 layers whether it slides"),
        ({"attention__sliding_window_pattern": 2}, "pattern=2 must say of each of 4 layers"),
        ({"attention__head_count_kv": [2, 1, 1, 1]}, "layers of sliding_attention must be alike"),
        ({"attention__head_count_kv": [2, 1]}, r"head_count_kv=\[2, 1\] has no entry for each of 4"),
        ({"attention__head_count": [4, 4, 8, 4]}, r"attention\.head_count=\[4, 4, 8, 4\]"),
        ({"feed_forward_length": [96, 96, 96, 192], "attention__shared_kv_layers": 2}, "must be one width, and it or"),
        ({"rope__dimension_count_swa": 8}, r"rope\.dimension_count_swa=8 of head size 16"),
        ({"rope__scaling__type": "yarn"}, r"rope\.scaling\.type='yarn' is not supported"),
        ({"attention__key_length_swa": None}, r"no gemma4\.attention\.key_length_swa"),
    ],
)
def test_what_a_config_cannot_say_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, **changes)
