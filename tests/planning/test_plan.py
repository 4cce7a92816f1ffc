"""Plans agree with the engine, say plainly what does not fit, and need no weights."""

from __future__ import annotations

import json
import subprocess

import pytest
from checkpoints import CHECKPOINTS, make_checkpoint
from gemma4_checkpoints import make as make_gemma4
from gguf import GGMLQuantizationType
from gguf_files import write_quantised_llama
from qwen_vl_checkpoints import make as make_qwen
from typer.testing import CliRunner
from vision_checkpoints import gemma3_config

from jpaged import LLM, ImageSources, NGram, PyramidKV
from jpaged.cli.main import app
from jpaged.execution import device_memory
from jpaged.execution.device_memory import VARIABLES, device_bytes
from jpaged.execution.encode import RowLengths
from jpaged.loading import convert_checkpoint
from jpaged.planning import compile_programs_for, plan

SIZES = {"block_size": 8, "max_num_batched_tokens": 64}
FREE = 24 << 20
"""Bytes of memory: fewer than 32 sequences of 512 tokens would use."""


@pytest.fixture
def no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("JPAGED_AOT_ENVS", str(tmp_path))


def config_of(name: str, folder) -> str:
    CHECKPOINTS[name].to_json_file(folder / "plan.json")
    return str(folder / "plan.json")


@pytest.mark.parametrize(
    ("context", "concurrency", "scarce"),
    [(64, 4, False), (512, 32, True)],
    ids=["all that is useful", "all that is free"],
)
def test_a_plan_is_what_the_engine_takes(context, concurrency, scarce, tmp_path, monkeypatch, request):
    """Gemma-2 has two groups of layers, whose blocks are padded to a common page."""
    if scarce:
        request.getfixturevalue("in_process")
    make_checkpoint("gemma2", tmp_path)
    made = plan(
        config_of("gemma2", tmp_path),
        "cpu",
        context=context,
        concurrency=concurrency,
        memory_bytes=FREE if scarce else None,
        **SIZES,
    )
    if scarce:
        monkeypatch.setattr(device_memory, "host_memory_available", lambda: FREE)
    llm = LLM(str(tmp_path), max_model_len=context, max_num_seqs=concurrency, **SIZES)
    report = llm.memory_report()
    assert made.fits and made.compiler.startswith("jaxlib")
    assert made.weight_bytes == device_bytes(llm.params)
    assert made.pool_bytes == report.num_pages * report.page_bytes and made.page_bytes == report.page_bytes
    assert f"1/{report.num_pages:,} of the pool; each layer group strands up to one" in str(made)
    assert [(g.name, g.block_bytes) for g in made.groups] == [(g.name, g.block_bytes) for g in report.groups]
    assert [g.num_blocks * g.block_bytes for g in made.groups] == [made.pool_bytes] * 2
    assert (made.sequences == concurrency) is not scarce
    assert all(program.temporary_bytes > 0 for program in made.programs)
    assert made.decode_tokens_per_s > made.full_decode_tokens_per_s > 0 and made.prefill_tokens_per_s > 0
    assert "about" in str(made) and "at most" not in str(made)  # speeds measured here are no bounds


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_plan_of_a_saved_checkpoint_holds_what_it_holds(quantization, in_process, tmp_path):
    make_checkpoint("llama", tmp_path / "source")
    saved = str(tmp_path / "saved")
    convert_checkpoint(tmp_path / "source", saved, quantization=quantization)
    made = plan(saved, "cpu", context=64, concurrency=4, **SIZES)
    with LLM(saved, max_model_len=64, max_num_seqs=4, **SIZES) as llm:
        assert made.weight_bytes == device_bytes(llm.params)


def test_a_saved_checkpoint_is_planned_in_no_other_form(in_process, tmp_path):
    make_checkpoint("llama", tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "saved", quantization="int8")
    with pytest.raises(ValueError, match=r"quantization='int4': .*saved is quantised already"):
        plan(str(tmp_path / "saved"), "cpu", context=64, concurrency=4, quantization="int4", **SIZES)


def test_a_plan_of_a_gguf_file_holds_its_own_blocks(in_process, tmp_path):
    file = str(write_quantised_llama(tmp_path / "m.gguf", GGMLQuantizationType.Q4_1))
    made = plan(file, "cpu", context=64, concurrency=4, quantization="gguf", **SIZES)
    llm = LLM(file, max_model_len=64, max_num_seqs=4, quantization="gguf", **SIZES)
    report = llm.memory_report()
    assert made.weight_bytes == device_bytes(llm.params)
    assert made.pool_bytes == report.num_pages * report.page_bytes
    assert made.fits and all(program.temporary_bytes > 0 for program in made.programs)
    assert made.weight_bytes < plan(file, "cpu", context=64, concurrency=4, **SIZES).weight_bytes / 4


def test_only_a_quantised_gguf_file_can_be_planned_as_its_blocks(no_compiler, in_process, tmp_path):
    with pytest.raises(
        ValueError, match="quantization='gguf' needs a GGUF file with quantised tensors; this model has"
    ):
        plan(config_of("llama", tmp_path), "cpu", context=64, quantization="gguf")


def test_without_a_compiler_the_plan_is_called_an_estimate(no_compiler, in_process, tmp_path):
    made = plan(config_of("llama4", tmp_path), "v5e-1", context=512, concurrency=4, memory_bytes=1 << 30, **SIZES)
    assert made.fits and made.compiler == "" and "ESTIMATED" in str(made)
    assert 0 < made.temporary_bytes < 16 << 20
    assert made.sequences == 4


def test_a_model_that_cannot_fit_is_told_with_its_numbers(no_compiler):
    """70.55 billion parameters of two bytes over eight devices; norms are on each."""
    result = CliRunner().invoke(app, ["plan", "--model", "llama-3.3-70b", "--device", "v5e-8"])
    assert result.exit_code == 1
    assert "DOES NOT FIT: weights take 16.43 GiB of each device, where 14.17 GiB may be used" in result.output


@pytest.mark.parametrize(
    ("name", "parameters", "groups"),
    [
        ("jamba-v0.1", 51_570_323_328, {"state", "full"}),
        ("bamba-9b", 9_780_235_392, {"state", "full"}),
        ("mamba-codestral-7b", 7_285_403_648, {"state"}),
        ("qwen3-next-80b-a3b", 79_674_391_296, {"state", "full"}),
        ("lfm2-1.2b", 1_170_340_608, {"state", "full"}),
        ("deepseek-v2-lite", 15_706_484_224, {"full"}),
        ("llama-3.2-11b-vision", 10_670_220_835, {"full", "images"}),
    ],
)
def test_published_shapes_that_are_not_all_attention_are_planned(name, parameters, groups, no_compiler, in_process):
    made = plan(name, "b200", context=2048, concurrency=8)
    assert made.fits and made.sequences == 8 and {group.name for group in made.groups} == groups
    assert made.weight_bytes == pytest.approx(2 * parameters, rel=0.001)  # a few vectors are float32


def test_a_gpus_plan_names_the_share_that_jax_takes_and_a_bound_that_no_batch_beats(
    no_compiler, in_process, tmp_path, monkeypatch
):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    made = plan(config_of("llama", tmp_path), "l4", context=512, concurrency=8, **SIZES)
    assert "90% of the 20.90 GiB that programs may take, 95% of the device (XLA_CLIENT_MEM_FRACTION)" in str(made)
    assert "at most" in str(made) and "8 sequences that just began" in str(made)
    assert made.decode_tokens_per_s > made.full_decode_tokens_per_s


def test_list_names_shapes_and_devices():
    result = CliRunner().invoke(app, ["plan", "--list"])
    assert result.exit_code == 0
    shapes, devices = result.output.splitlines()
    assert "llama-3.1-8b" in shapes and "qwen3-0.6b" in shapes and "h200-8" in devices
    for given, missing in ((["--device", "l4"], "--model"), (["--model", "llama-3.1-8b"], "--device")):
        refused = CliRunner().invoke(app, ["plan", *given])
        assert refused.exit_code == 2 and f"{missing} is needed" in refused.output


def test_bfloat16_on_a_cpu_takes_about_half_the_memory_of_float32(no_compiler, in_process, tmp_path):
    config = config_of("llama", tmp_path)
    halves, floats = (plan(config, "cpu", context=64, concurrency=2, dtype=dtype) for dtype in ("bfloat16", "float32"))
    assert 0.5 * floats.weight_bytes < halves.weight_bytes < 0.7 * floats.weight_bytes
    assert 2 * halves.groups[0].block_bytes == floats.groups[0].block_bytes


def test_a_pool_below_one_sequence_does_not_fit(no_compiler, in_process, tmp_path):
    made = plan(config_of("llama", tmp_path), "t4", context=512, kv_cache_memory_bytes=1 << 19, **SIZES)
    assert not made.fits
    assert made.problem == "the pool does not hold one sequence of 512 tokens"


def test_a_t4_computes_in_float16_unless_something_else_is_asked_for(no_compiler, in_process, tmp_path):
    config = config_of("llama", tmp_path)
    sizes = {"context": 64, "kv_cache_memory_bytes": 1 << 24, **SIZES}
    assert plan(config, "t4", **sizes).dtype == "float16"
    assert plan(config, "l4", **sizes).dtype == "bfloat16"
    with pytest.raises(ValueError, match=r"dtype='bfloat16' needs a GPU of compute capability 8.0 or more, .* 7.5"):
        plan(config, "t4", dtype="bfloat16", **sizes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "v9-8"}, r"device='v9-8' is not known; known are cpu, "),
        ({"context": 513}, r"max_model_len=513 is above the model's max_position_embeddings=512"),
        ({"block_size": 12}, r"block_size=12 is not a multiple of 8"),
        ({"memory_bytes": 0}, r"memory_bytes=0 must be at least 1"),
        ({"memory_bytes": "1e9"}, r"memory_bytes='1e9' must be an integer"),
        ({"tensor_parallel_size": 2}, r"tensor_parallel_size=2: the device's name says how many"),
        ({"model": "no-such.json"}, r"model='no-such.json' does not exist"),
    ],
)
def test_bad_values_are_named_before_anything_is_compiled(change, message, tmp_path, monkeypatch):
    monkeypatch.setattr("jpaged.planning.child_process.subprocess.run", None)
    asked = {"model": config_of("llama", tmp_path), "device": "cpu", "context": 512, **change}
    with pytest.raises(ValueError, match=message):
        plan(asked.pop("model"), asked.pop("device"), **asked)


@pytest.mark.parametrize("make", [plan, compile_programs_for])
@pytest.mark.parametrize(
    "setting",
    [
        {"speculative": NGram(tokens=4)},
        {"kv_budget": PyramidKV(budget=64), "enable_prefix_caching": False},
        {"data_parallel_size": 2},
        {"images": ImageSources(folders=["/"])},
        {"compiled_programs": "folder"},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_settings_that_nothing_is_made_with_are_refused_by_name(make, setting, tmp_path):
    folder = {} if make is plan else {"folder": tmp_path / "programs"}
    with pytest.raises(
        ValueError, match=f"^{next(iter(setting))}=.* must be left out, as .*(plans are made|are compiled) without: "
    ):
        make("qwen3-0.6b", "v5e-1", **folder, **setting)


def test_of_a_model_that_sees_the_language_model_alone_is_planned_where_that_is_asked(
    no_compiler, in_process, tmp_path
):
    gemma3_config().to_json_file(tmp_path / "plan.json")
    file = str(tmp_path / "plan.json")
    seeing = plan(file, "l4", context=64, concurrency=2, **SIZES)
    blind = plan(file, "l4", context=64, concurrency=2, language_model_only=True, **SIZES)
    assert blind.weight_bytes < seeing.weight_bytes


def test_a_tower_is_planned_for_the_largest_picture_that_the_processor_makes(no_compiler, in_process, tmp_path):
    """Of 4 patches a token. Pictures within 40 squares have up to 89 tokens, one high, and those within 20 up to 63."""
    make_qwen("qwen3_vl", tmp_path)
    sizes = SIZES | {"context": 512, "concurrency": 4, "memory_bytes": 1 << 30, "max_num_batched_tokens": 48}
    made = plan(str(tmp_path), "l4", **sizes)
    assert 0 < made.tower_bytes < made.weight_bytes
    lowered = plan(str(tmp_path), "l4", mm_processor_kwargs={"max_pixels": 20 * 64}, **sizes)
    assert 4 * 89 <= made.row_lengths[-1] < 4 * 105 and 4 * 63 <= lowered.row_lengths[-1] < 4 * 75
    assert f"takes rows of 12 to {made.row_lengths[-1]} patches, 10 lengths" in str(made)
    (tmp_path / "processor_config.json").unlink(missing_ok=True)
    (tmp_path / "preprocessor_config.json").unlink(missing_ok=True)
    assert plan(str(tmp_path), "l4", **sizes).row_lengths[-1] == 4 * 512


def test_the_estimate_of_a_tower_does_not_grow_with_the_text_model(no_compiler, in_process, tmp_path):
    """The config alone is planned. Next to a wider text model no picture is encoded in parts, so none is kept."""
    make_qwen("qwen3_vl", tmp_path)
    config, encoders = json.loads((tmp_path / "config.json").read_text()), []
    for number, times in enumerate((1, 64)):
        config["text_config"]["intermediate_size"] *= times
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(config))
        made = plan(str(file), "l4", context=64, concurrency=2, **SIZES)
        (encoder,) = (program for program in made.programs if program.name == "image encoder")
        encoders.append(encoder.temporary_bytes)
    assert encoders[0] > encoders[1] > 0.5 * encoders[0]


def test_a_plan_has_room_for_a_half_encoded_picture(no_compiler, in_process, tmp_path, monkeypatch):
    """A patch keeps 40 numbers of 4 bytes, in front of a layer, in two places for deepstack and one for the rest; the
    bytes of its 4 x 4 pixels in two frames; and four numbers of 2 bytes. A row has six of 4, and 65 starts."""
    make_qwen("qwen3_vl", tmp_path)
    sizes = SIZES | {"context": 512, "concurrency": 4, "memory_bytes": 1 << 30, "max_num_batched_tokens": 48}
    made = plan(str(tmp_path), "l4", **sizes)
    monkeypatch.setattr("jpaged.execution.lowering.row_lengths", lambda _, rows, **__: RowLengths(rows.lengths, ()))
    whole = plan(str(tmp_path), "l4", **sizes)
    a_patch = 40 * 4 * (1 + 2 + 1) + 3 * 2 * 4 * 4 + 4 * 2
    assert made.temporary_bytes - whole.temporary_bytes == made.row_lengths[-1] * a_patch + (6 + 65) * 4


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gemma4_moe", "gemma4_ahead", "gemma4_unified"])
def test_gemma_4_is_planned_with_its_tower(no_compiler, in_process, tmp_path, name):
    """The 12B model projects patches and has no tower to speak of."""
    make_gemma4(name, tmp_path)
    made = plan(str(tmp_path), "l4", context=448, concurrency=4, memory_bytes=1 << 30, **SIZES)
    assert 0 < made.tower_bytes < made.weight_bytes
    assert f"takes rows of {made.row_lengths[0]:,} to {made.row_lengths[-1]:,} patches" in str(made)


def test_the_config_of_a_hub_id_is_that_of_the_revision_and_kept_where_asked(
    no_compiler, in_process, tmp_path, monkeypatch
):
    file, asked = config_of("gemma2", tmp_path), []

    def download(repo_id, name, **options):
        asked.append((repo_id, name, options))
        return file

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    where = {"revision": "v2", "download_dir": str(tmp_path)}
    plan("org/model", "l4", context=64, concurrency=2, **where, **SIZES)
    assert asked == [("org/model", "config.json", {"revision": "v2", "cache_dir": str(tmp_path)})]
    with pytest.raises(ValueError, match="revision='v2' needs a hub id"):
        plan(file, "l4", context=64, revision="v2")


def test_a_model_that_is_not_implemented_is_refused(in_process, tmp_path):
    config = CHECKPOINTS["llama"].to_dict() | {"hidden_act": "tanh"}
    file = tmp_path / "plan.json"
    type(CHECKPOINTS["llama"])(**config).to_json_file(file)
    with pytest.raises(ValueError, match="hidden_act='tanh' is not supported"):
        plan(str(file), "cpu", context=64)


def test_whole_experts_are_planned_for_models_that_have_some(no_compiler, in_process, tmp_path):
    sizes = SIZES | {"context": 512, "concurrency": 4, "memory_bytes": 1 << 30, "enable_expert_parallel": True}
    assert plan(config_of("llama4", tmp_path), "v5e-1", **sizes).fits
    options = ["--model", config_of("llama", tmp_path), "--device", "v5e-1", "--context", "64"]
    result = CliRunner().invoke(app, ["plan", *options, "--enable-expert-parallel"])
    assert result.exit_code == 2 and "Llama has no experts" in result.output


def test_a_compiler_that_fails_is_told_with_its_last_words(monkeypatch, tmp_path):
    def fail(command, **options):
        return subprocess.CompletedProcess(command, 1, "", "no such chip")

    monkeypatch.setattr("jpaged.planning.child_process.subprocess.run", fail)
    options = ["--model", config_of("llama", tmp_path), "--device", "cpu", "--context", "64"]
    result = CliRunner().invoke(app, ["plan", *options])
    assert result.exit_code == 3
    assert "compiling for cpu with" in result.output and "no such chip" in result.output


def test_a_model_that_is_not_there_is_refused_with_the_shapes_that_are():
    with pytest.raises(ValueError, match=r"model='lama-3' is no local file.*published shapes are .*llama-3\.1-8b"):
        plan("lama-3", "cpu")
