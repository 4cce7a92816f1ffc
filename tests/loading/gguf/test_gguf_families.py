"""Every architecture: a tiny checkpoint, written with the gguf package and read back, has its config and weights."""

from types import SimpleNamespace

import numpy as np
import pytest
import thorough
from dense_model import abstract, run_dense
from flax import nnx
from gguf import GGMLQuantizationType as Encoding
from gguf import quants
from gguf_files import SIZES as SIZES_OF_FILES
from gguf_files import write_gguf
from gguf_of_checkpoint import write_checkpoint
from greedy_reference import assert_same_tokens, random_prompts, torch_greedy

torch = pytest.importorskip("torch")

from transformers import (  # noqa: E402
    ApertusConfig,
    ArceeConfig,
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    FalconH1Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    JambaConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Llama4TextConfig,
    Mamba2Config,
    MiniMaxM2Config,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PhiConfig,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

from jpaged import LLM, SamplingParams  # noqa: E402
from jpaged.loading import load_model  # noqa: E402
from jpaged.loading.gguf.config import config_from_gguf  # noqa: E402
from jpaged.loading.gguf.reader import GGUFFile  # noqa: E402
from jpaged.loading.gguf.rows import GGUFExperts, GGUFRows  # noqa: E402
from jpaged.loading.gguf.weights import GGUFWeights  # noqa: E402
from jpaged.loading.model_config import as_transformers  # noqa: E402
from jpaged.loading.open_checkpoint import model_types  # noqa: E402
from jpaged.loading.parameters.formats import stored_formats  # noqa: E402
from jpaged.loading.parameters.targets import targets_of  # noqa: E402
from jpaged.loading.registry import model_class  # noqa: E402
from jpaged.loading.renamed_tensors import separate_experts  # noqa: E402
from jpaged.loading.safetensors_reader import SafetensorsWeights  # noqa: E402
from jpaged.loading.weight_formats.stored_codes import read_codes  # noqa: E402

SIZES = {
    "vocab_size": 43,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEADS = SIZES | {"head_dim": 16, "tie_word_embeddings": False}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
OPEN = SIZES | {"tie_word_embeddings": False}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1],
    "long_factor": [1.0, 4.0],
    "original_max_position_embeddings": 64,
}
MULTIPLIERS = {
    "embedding_multiplier": 1.7,
    "logits_scaling": 0.7,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.4,
}
GROUPED = {
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
DELTA = HEADS | {
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": PARTIAL,
}
SHARED = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}
GRANITE_4 = {
    **OPEN,
    **MULTIPLIERS,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "shared_intermediate_size": 40,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 3,
    "position_embedding_type": None,
}
FALCON_H1 = {
    "mamba_d_ssm": 48,
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 3,
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
}
PHI_OF_LONG_CONTEXTS = Phi3Config(**OPEN, original_max_position_embeddings=64, rope_parameters=LONG)
CONFIGS = [
    Gemma3TextConfig(
        **SIZES | {"head_dim": 16, "num_hidden_layers": 7},
        query_pre_attn_scalar=16,
        sliding_window=7,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
    ),
    Gemma4TextConfig(
        **SIZES | {"head_dim": 16, "num_hidden_layers": 6, "num_key_value_heads": 1},
        global_head_dim=32,
        sliding_window=7,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        vocab_size_per_layer_input=43,
        hidden_size_per_layer_input=10,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        final_logit_softcapping=20.0,
    ),
    Gemma4TextConfig(
        **HEADS | {"tie_word_embeddings": True},
        global_head_dim=32,
        num_global_key_value_heads=1,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        enable_moe_block=True,
        num_experts=3,
        top_k_experts=2,
        moe_intermediate_size=32,
    ),
    MixtralConfig(**HEADS, num_local_experts=3, sliding_window=None),
    Qwen3MoeConfig(**HEADS, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True),
    Qwen2MoeConfig(
        **SIZES,
        tie_word_embeddings=False,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=40,
    ),
    OlmoeConfig(**SIZES, tie_word_embeddings=False, num_experts=3, num_experts_per_tok=2),
    Olmo2Config(**SIZES, tie_word_embeddings=False),
    SeedOssConfig(**HEADS, attention_out_bias=True, mlp_bias=True),
    Llama4TextConfig(
        **HEADS, intermediate_size_mlp=40, num_local_experts=3, num_experts_per_tok=2, interleave_moe_layer_step=2
    ),
    GptOssConfig(
        **HEADS,
        num_local_experts=3,
        num_experts_per_tok=2,
        sliding_window=7,
        rope_parameters={**YARN, "truncate": False},
    ),
    Mamba2Config(
        vocab_size=43,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=16,
        state_size=8,
        n_groups=2,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    JambaConfig(
        **SIZES | {"num_hidden_layers": 6},
        tie_word_embeddings=False,
        num_experts=3,
        attn_layer_period=3,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=5,
    ),
    Lfm2Config(**SIZES, layer_types=["conv", "conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False),
    Phi3Config(**OPEN, sliding_window=7, rope_parameters=PARTIAL, original_max_position_embeddings=4096),
    PHI_OF_LONG_CONTEXTS,
    GemmaConfig(**HEADS | {"tie_word_embeddings": True}),
    GraniteConfig(**OPEN, **MULTIPLIERS, attention_bias=True),
    GraniteMoeConfig(**OPEN, **MULTIPLIERS, num_local_experts=3, num_experts_per_tok=2),
    GraniteMoeHybridConfig(**GRANITE_4, num_local_experts=3, num_experts_per_tok=2),
    GraniteMoeHybridConfig(**GRANITE_4, num_local_experts=0, num_experts_per_tok=0),
    SmolLM3Config(**OPEN),
    Starcoder2Config(**SIZES),
    ArceeConfig(**OPEN, attention_bias=True, mlp_bias=True),
    NemotronConfig(**HEADS, attention_bias=True, mlp_bias=True, rope_parameters=PARTIAL),
    StableLmConfig(**OPEN, use_qkv_bias=True, rope_parameters=PARTIAL),
    StableLmConfig(**OPEN, use_parallel_residual=True, rope_parameters=PARTIAL),
    CohereConfig(**SIZES, logit_scale=0.9, use_qk_norm=True),
    Cohere2Config(**SIZES, logit_scale=0.9, sliding_window=7),
    Exaone4Config(**OPEN, sliding_window=7, layer_types=["sliding_attention", "full_attention"] * 2),
    HunYuanDenseV1Config(**HEADS),
    Ernie4_5Config(**HEADS),
    Ernie4_5_MoeConfig(
        **HEADS,
        moe_num_experts=3,
        moe_k=2,
        moe_intermediate_size=32,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
        moe_layer_end_index=3,
    ),
    Glm4Config(**HEADS, rope_parameters=PARTIAL),
    Glm4MoeConfig(**HEADS, **GROUPED, use_qk_norm=True, attention_bias=True, rope_parameters=PARTIAL),
    Dots1Config(**HEADS, **GROUPED, sliding_window=None),
    MiniMaxM2Config(**HEADS, num_local_experts=3, num_experts_per_tok=2, rope_parameters=PARTIAL),
    Lfm2MoeConfig(
        **SIZES,
        layer_types=["conv", "conv", "full_attention", "conv"],
        num_dense_layers=1,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
    Qwen3NextConfig(**DELTA, **SHARED),
    Qwen3_5TextConfig(**DELTA),
    Qwen3_5MoeTextConfig(**{name: value for name, value in DELTA.items() if name != "intermediate_size"}, **SHARED),
    GPT2Config(
        vocab_size=43,
        n_positions=512,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_inner=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
]
NEMOTRON_H = {name: size for name, size in HEADS.items() if name != "num_hidden_layers"} | {
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 3,
    "conv_kernel": 3,
}
LATENT = OPEN | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_group": 2,
    "topk_group": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
CONFIGS += [
    ApertusConfig(**OPEN, attention_bias=True),
    GPTNeoXConfig(
        **{name: size for name, size in OPEN.items() if name != "num_key_value_heads"},
        rope_parameters=PARTIAL,
        use_parallel_residual=False,
    ),
    MistralConfig(**HEADS, sliding_window=None),
    Ministral3Config(
        **HEADS, rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
    ),
    PhiConfig(**OPEN | {"num_key_value_heads": 4}, rope_parameters=PARTIAL),
    Olmo3Config(
        **OPEN,
        sliding_window=7,
        rope_parameters={
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    NemotronHConfig(
        **NEMOTRON_H,
        layers_block_type=["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
        mlp_bias=True,
        use_bias=True,
    ),
    NemotronHConfig(
        **{name: size for name, size in NEMOTRON_H.items() if name != "intermediate_size"},
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
        use_conv_bias=False,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=40,
        moe_latent_size=64,
        routed_scaling_factor=1.5,
    ),
    DeepseekV2Config(**LATENT, q_lora_rank=None, n_shared_experts=2, topk_method="group_limited_greedy"),
    DeepseekV3Config(
        **LATENT,
        q_lora_rank=20,
        n_shared_experts=1,
        rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
    ),
    HunYuanMoEV1Config(**HEADS, num_experts=3, moe_topk=2, attention_bias=True),
    FalconH1Config(**HEADS, **FALCON_H1),
]
GENERATED = ("gemma3_text", "gemma4_text", "mamba2")
"""Families whose files generate tokens in every run."""
VOCABULARY = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["<pad>", "<s>", "</s>", *map(chr, range(65, 104)), "AB"],
    "tokenizer.ggml.merges": ["A B"],
}
NOT_OF_THE_MODEL = {"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache", "torch_dtype"}
NOT_OF_THE_MODEL |= {"use_mamba_kernels", "output_router_logits", "router_aux_loss_coef", "initializer_range"}


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda config: config.model_type)
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param.model_type)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(request.param, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.2)
    model.save_pretrained(folder)
    return SimpleNamespace(folder=folder, config=request.param, path=folder / "m.gguf", model=model.eval())


def test_config_and_weights_are_the_checkpoints(family):
    file = GGUFFile(write_checkpoint(family.path, family.folder, family.config))
    found, want = (config.to_dict() for config in (as_transformers(config_from_gguf(file)), family.config))
    for name in NOT_OF_THE_MODEL:
        found.pop(name, None), want.pop(name, None)
    assert found == want
    read = GGUFWeights(file)
    saved = separate_experts(SafetensorsWeights(family.folder), model_class(family.config.model_type))
    assert set(read.names()) == set(saved.names())
    for name in saved.names():
        assert read.shape(name) == saved.shape(name), name
        np.testing.assert_allclose(np.asarray(read.read(name)), saved.read(name), rtol=1e-6, atol=1e-6, err_msg=name)


def test_a_file_generates_what_transformers_generates_with_its_checkpoint(family):
    if family.config.model_type not in GENERATED and not thorough.NIGHTLY:
        pytest.skip("a family that is generated with at night")
    if family.config is PHI_OF_LONG_CONTEXTS:
        pytest.skip("transformers takes the short factors for short sequences")
    path = write_checkpoint(family.path, family.folder, family.config, vocabulary=VOCABULARY)
    llm = LLM(str(path), dtype="float32", max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64)
    prompts = random_prompts(43, lengths=(2, 9, 30))
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    guesses = [output.outputs[0].token_ids for output in outputs]
    assert_same_tokens(outputs, torch_greedy(family.model, prompts, 24, guesses))


def test_the_matrices_of_falcon_h1s_files_have_its_multipliers(tmp_path):
    names = ("attention_in", "attention_out", "ssm_in", "ssm_out", "key", "embedding", "lm_head")
    several = {"mlp_multipliers": [1.3, 0.7], "ssm_multipliers": [0.6, 0.7, 1.2, 1.3, 0.8]}
    multipliers = {f"{name}_multiplier": 0.7 + 0.1 * n for n, name in enumerate(names)}
    config = FalconH1Config(**HEADS, **FALCON_H1, **multipliers, **several)
    model = saved(config, tmp_path / "saved")
    path = write_checkpoint(tmp_path / "m.gguf", tmp_path / "saved", config, vocabulary=VOCABULARY)
    loaded = load_model(path, dtype="float32")
    tokens = np.random.default_rng(0).integers(0, 43, 20)
    with torch.no_grad():
        expected = model(torch.tensor(tokens)[None]).logits[0].numpy()
    found = run_dense(nnx.merge(loaded.graphdef, loaded.params), tokens)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("experts", [Encoding.MXFP4, Encoding.Q8_0, Encoding.Q4_1], ids=lambda encoding: encoding.name)
@pytest.mark.parametrize("shards", [1, 4])
def test_experts_blocks_are_kept_to_the_last_bit_for_any_number_of_shards(family, experts, shards):
    """Inner experts' widths of 32 and 64 leave shards of 4 groups smaller than those of the file."""
    if not any(getattr(family.config, field, None) for field in ("num_local_experts", "num_experts")):
        pytest.skip("a family without experts")
    if family.config.model_type not in model_types():
        pytest.skip("a family that is not installed")
    file = GGUFFile(write_checkpoint(family.path, family.folder, family.config, experts))
    if not any("_exps" in name for name in file.tensors):
        pytest.skip("a checkpoint without experts")
    reader = GGUFWeights(file)
    model = abstract(config_from_gguf(file), tensor_parallel=shards)
    targets = targets_of(model)
    forms, _ = stored_formats(reader, targets, shards)
    found = [target for target in targets if target.path in forms]
    assert {target.source.path[-2] for target in found} == {"gate_up", "down"}
    for target in found:
        source, form = target.source, forms[target.path]
        assert form.codec.paired == (experts != Encoding.Q8_0)
        kept = read_codes(source, form, reader)
        assert kept.codec == form.codec
        floats = np.asarray(source.convert(*map(reader.read, source.sources)))
        assert kept.shape == floats.shape == target.shape
        np.testing.assert_array_equal(kept.dequantised(np.float32), floats, err_msg=target.name)


@pytest.mark.parametrize("index", [np.s_[:, :, 3:90], np.s_[1:2, 8:, 1::2], np.s_[:, 5:40, :64], np.s_[..., ::2]])
@pytest.mark.parametrize("alternating", [False, True])
def test_a_slice_of_all_experts_reads_what_it_says(index, alternating):
    values = np.random.default_rng(0).standard_normal((2, 3, 64, 48), np.float32)  # parts, experts, outputs, inputs

    def matrix(rows):
        return GGUFRows(rows, lambda part: part, 1, 1, rows.dtype, range(64), range(48))

    lazy = GGUFExperts.of([[matrix(rows) for rows in part] for part in values], alternating=alternating)
    gate, up = values.swapaxes(2, 3)
    whole = np.stack([gate, up], -1).reshape(3, 48, 128) if alternating else np.concatenate([gate, up], -1)
    assert lazy[index].shape == whole[index].shape
    np.testing.assert_array_equal(lazy[index], whole[index])
    turned, index = lazy.swapaxes(1, 2), (*index[:1], *index[:0:-1])
    if index[0] is not Ellipsis:
        assert turned.shape == whole.swapaxes(1, 2).shape
        np.testing.assert_array_equal(turned[index], whole.swapaxes(1, 2)[index])


def test_maverick_norms_no_queries_and_files_may_name_the_chunk(tmp_path):
    config = next(config for config in CONFIGS if config.model_type == "llama4_text")
    router = {f"blk.{n}.ffn_gate_inp.weight": np.zeros((1, 32), np.float32) for n in (1, 3)}
    tensors = router | {"token_embd.weight": np.zeros((43, 32), np.float32)}
    keys = {"expert_count": 128, "expert_used_count": 1, "expert_feed_forward_length": 64} | {
        "interleave_moe_layer_step": 2,
        "attention.sliding_window": 11,
    }
    extra = {f"llama4.{key}": value for key, value in keys.items()}
    found = config_from_gguf(GGUFFile(write_gguf(tmp_path / "m.gguf", "llama4", tensors, extra, block_count=4)))
    assert not found.use_qk_norm
    assert (found.attention_chunk_size, found.moe_layers) == (11, config.moe_layers)


@pytest.mark.parametrize("arch", ["gemma3", "olmo2", "exaone4"])
@pytest.mark.parametrize(
    ("pattern", "local"), [(3, [1, 1, 0, 1, 1, 0, 1]), ([False, True] * 3 + [True], [0, 1] * 3 + [1])]
)
def test_a_file_may_say_which_layers_slide(tmp_path, arch, pattern, local):
    tensors = {"token_embd.weight": np.zeros((43, 64), np.float32)}
    extra = {f"{arch}.attention.sliding_window": 7, f"{arch}.attention.sliding_window_pattern": pattern}
    found = config_from_gguf(GGUFFile(write_gguf(tmp_path / "m.gguf", arch, tensors, extra, block_count=7)))
    assert [kind == "sliding_attention" for kind in found.layer_types] == list(map(bool, local))
    if arch == "gemma3":
        assert found.rope_parameters["sliding_attention"]["rope_theta"] == 10000.0


@pytest.mark.parametrize("arch", ["gemma3", "olmo2", "exaone4"])
def test_a_list_of_sliding_layers_of_another_length_is_refused(tmp_path, arch):
    tensors = {"token_embd.weight": np.zeros((43, 64), np.float32)}
    extra = {f"{arch}.attention.sliding_window": 7, f"{arch}.attention.sliding_window_pattern": [True] * 3}
    with pytest.raises(ValueError, match="sliding_window_pattern has 3 entries for 7 layers"):
        config_from_gguf(GGUFFile(write_gguf(tmp_path / "m.gguf", arch, tensors, extra, block_count=7)))


def test_jambas_layers_that_follow_no_period_are_refused(tmp_path):
    attends = {f"blk.{n}.attn_q.weight": np.zeros((32, 32), np.float32) for n in (1, 2, 5)}
    tensors = attends | {"token_embd.weight": np.zeros((43, 32), np.float32)}
    with pytest.raises(ValueError, match=r"layers \[1, 2, 5\] of 6 are not every n-th one"):
        config_from_gguf(GGUFFile(write_gguf(tmp_path / "m.gguf", "jamba", tensors, block_count=6)))


def test_layers_that_draft_are_left_out(tmp_path):
    """GLM-4.5's files end with a layer of multi-token prediction."""
    shape = np.zeros((32, 32), np.float32)
    tensors = {f"blk.{n}.attn_q.weight": shape for n in range(3)} | {"blk.2.nextn.eh_proj.weight": shape}
    keys = {"nextn_predict_layers": 1, "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
    keys |= {"expert_shared_count": 1, "leading_dense_block_count": 1, "expert_gating_func": 2}
    extra = {f"glm4moe.{key}": value for key, value in keys.items()}
    tensors["token_embd.weight"] = np.zeros((43, 64), np.float32)
    path = write_gguf(tmp_path / "m.gguf", "glm4moe", tensors, extra, block_count=3)
    assert config_from_gguf(GGUFFile(path)).num_hidden_layers == 2
    assert set(GGUFWeights(GGUFFile(path)).names()) == {
        "model.embed_tokens.weight",
        *(f"model.layers.{n}.self_attn.q_proj.weight" for n in range(2)),
    }


@pytest.mark.parametrize(
    ("arch", "tensor", "message"),
    [
        ("stablelm", "attn_q_norm.weight", "norms of heads"),
        ("granitemoe", "ffn_gate_shexp.weight", "a shared expert is not supported"),
        ("granitehybrid", "ffn_norm.weight", r"rope.scaling.finetuned=True \(Bamba\) is not supported"),
    ],
)
def test_tensors_that_a_family_does_not_have_are_refused(tmp_path, arch, tensor, message):
    tensors = {"token_embd.weight": np.zeros((43, 64), np.float32), f"blk.0.{tensor}": np.zeros(64, np.float32)}
    changes = {"attention__layer_norm_epsilon": 1e-5, "rope__scaling__finetuned": True}
    path = write_gguf(tmp_path / "m.gguf", arch, tensors, **changes)
    with pytest.raises(ValueError, match=message):
        config_from_gguf(GGUFFile(path))


def saved(config, folder):
    """A random checkpoint of a config in a folder."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    return model


def test_glm_4_7_flash_is_read_as_the_deepseek_v3_that_its_files_say_it_is(tmp_path):
    own = {name: value for name, value in LATENT.items() if name != "first_k_dense_replace"}
    config = Glm4MoeLiteConfig(
        **own, q_lora_rank=20, n_shared_experts=1, mlp_layer_types=["dense", *["sparse"] * 3], rope_interleave=True
    )
    model = saved(config, tmp_path / "saved")
    path = write_checkpoint(tmp_path / "m.gguf", tmp_path / "saved", config, vocabulary=VOCABULARY)
    loaded = load_model(path, dtype="float32")
    assert loaded.config.model_type == "deepseek_v3"
    tokens = np.random.default_rng(0).integers(0, 43, 20)
    with torch.no_grad():
        expected = model(torch.tensor(tokens)[None]).logits[0].numpy()
    found = run_dense(nnx.merge(loaded.graphdef, loaded.params), tokens)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max(), rtol=0)


def test_old_files_of_deepseek_hold_keys_and_values_in_one_matrix(tmp_path):
    config = DeepseekV2Config(**LATENT, q_lora_rank=None, n_shared_experts=2, topk_method="group_limited_greedy")
    saved(config, tmp_path / "saved")
    new = GGUFFile(write_checkpoint(tmp_path / "new.gguf", tmp_path / "saved", config))
    checkpoint = SafetensorsWeights(tmp_path / "saved")
    tensors = {name: new.stored_rows(name) for name in new.tensors if "attn_v_b" not in name}
    for name in [name for name in tensors if "attn_k_b" in name]:
        layer = name.split(".")[1]
        del tensors[name]
        tensors[f"blk.{layer}.attn_kv_b.weight"] = checkpoint.read(f"model.layers.{layer}.self_attn.kv_b_proj.weight")
    later = ("key_length_mla", "value_length_mla", "expert_gating_func")
    keys = {key: value for key, value in new.metadata.items() if not key.endswith(later)}
    keys |= {"deepseek2.attention.key_length": 20, "deepseek2.attention.value_length": 10}
    keys["deepseek2.attention.head_count_kv"] = keys["deepseek2.attention.head_count"]
    del keys["general.architecture"]
    old = GGUFFile(write_gguf(tmp_path / "old.gguf", "deepseek2", tensors, keys, **dict.fromkeys(SIZES_OF_FILES)))
    assert as_transformers(config_from_gguf(old)).to_dict() == as_transformers(config_from_gguf(new)).to_dict()
    read, expected = GGUFWeights(old), GGUFWeights(new)
    assert set(read.names()) == set(expected.names())
    for name in expected.names():
        np.testing.assert_array_equal(np.asarray(read.read(name)), np.asarray(expected.read(name)), err_msg=name)


def test_a_matrix_whose_other_part_is_not_there_is_named(tmp_path):
    tensors = {
        "token_embd.weight": np.zeros((43, 64), np.float32),
        "blk.0.attn_k_b.weight": np.zeros((4, 8, 8), np.float32),
    }
    path = write_gguf(tmp_path / "m.gguf", "deepseek2", tensors)
    message = r"m\.gguf has tensor blk\.0\.attn_k_b\.weight, but there is no blk\.0\.attn_v_b\.weight"
    with pytest.raises(ValueError, match=message):
        GGUFWeights(GGUFFile(path))


def test_a_deepseek_whose_queries_grow_with_their_position_is_refused(tmp_path):
    tensors = {"token_embd.weight": np.zeros((43, 64), np.float32)}
    path = write_gguf(tmp_path / "m.gguf", "deepseek2", tensors, {"deepseek2.attention.temperature_scale": 0.5})
    with pytest.raises(ValueError, match=r"deepseek2 with attention\.temperature_scale=0\.5 is not supported"):
        config_from_gguf(GGUFFile(path))


@pytest.mark.parametrize(("key", "value"), [("alpha_p", None), ("beta", [0.5]), ("eps", ["x"] * 4), ("alpha_n", 1)])
def test_numbers_of_apertus_activations_that_are_not_there_are_named(tmp_path, key, value):
    keys = {f"xielu.{part}": [0.5] * 4 for part in ("alpha_p", "alpha_n", "beta", "eps")} | {f"xielu.{key}": value}
    tensors = {"token_embd.weight": np.zeros((43, 64), np.float32)}
    path = write_gguf(tmp_path / "m.gguf", "apertus", tensors, keys, block_count=4)
    with pytest.raises(ValueError, match=rf"m\.gguf: xielu\.{key}=.* is not a number for each of 4 layers"):
        GGUFWeights(GGUFFile(path))


def test_one_number_of_apertus_activations_may_be_that_of_all_layers(tmp_path):
    keys = {f"xielu.{part}": 0.5 for part in ("alpha_p", "alpha_n", "beta", "eps")}
    tensors = {"token_embd.weight": np.zeros((43, 64), np.float32)}
    read = GGUFWeights(GGUFFile(write_gguf(tmp_path / "m.gguf", "apertus", tensors, keys, block_count=4)))
    assert [float(read.read(f"model.layers.{n}.mlp.act_fn.eps")) for n in range(4)] == [0.5] * 4


def test_a_block_of_nemotron_h_of_no_known_kind_is_named(tmp_path):
    tensors = {
        "token_embd.weight": np.zeros((43, 64), np.float32),
        "blk.0.attn_q.weight": np.zeros((64, 64), np.float32),
    }
    keys = {"inner_size": 48, "time_step_rank": 6, "group_count": 2, "state_size": 8, "conv_kernel": 3}
    extra = {f"nemotron_h.ssm.{key}": value for key, value in keys.items()}
    path = write_gguf(tmp_path / "m.gguf", "nemotron_h", tensors, extra)
    with pytest.raises(ValueError, match=r"m\.gguf: blk\.1 has none of ssm_in, attn_q, ffn_gate_inp, ffn_up"):
        config_from_gguf(GGUFFile(path))


def test_experts_scored_otherwise_are_refused(tmp_path):
    tensors = {"token_embd.weight": np.zeros((43, 64), np.float32)}
    extra = {"dots1.expert_gating_func": 1, "dots1.expert_count": 4}
    path = write_gguf(tmp_path / "m.gguf", "dots1", tensors, extra)
    with pytest.raises(ValueError, match=r"expert_gating_func=1 is not supported; 2 \(sigmoid\) is"):
        config_from_gguf(GGUFFile(path))


def test_codes_of_matrices_that_are_turned_are_read_as_values(tmp_path):
    """GPT-2's checkpoints have [inputs, outputs], and its files [outputs, inputs]."""
    values = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
    encoded = quants.quantize(values, Encoding.Q8_0)
    tensors = {"token_embd.weight": np.zeros((43, 64), np.float32), "blk.0.ffn_up.weight": (encoded, Encoding.Q8_0)}
    read = GGUFWeights(GGUFFile(write_gguf(tmp_path / "m.gguf", "gpt2", tensors)))
    (encoding,) = read.encodings("transformer.h.0.mlp.c_fc.weight")
    assert encoding.format is None
    np.testing.assert_array_equal(
        read.read("transformer.h.0.mlp.c_fc.weight"), quants.dequantize(encoded, Encoding.Q8_0).T
    )
