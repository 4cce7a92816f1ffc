"""`jpaged compile` and what servers compile, from the command line."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from jpaged.cli.main import app


@pytest.mark.parametrize(("flags", "background"), [([], True), (["--warmup"], False), (["--no-warmup"], False)])
def test_a_server_compiles_in_the_background_unless_it_is_told_to_do_it_before_or_not_at_all(
    flags, background, monkeypatch
):
    built = []

    def build(model, **settings):
        built.append(settings)
        raise ValueError("no model today")

    monkeypatch.setattr("jpaged.llm.LLM", build)
    assert CliRunner().invoke(app, ["serve", "some/model", *flags]).exit_code == 2
    assert built[0]["background_compilation"] is background


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "v9-8"], "--device 'v9-8' is not known"),
        (["--device", "cpu"], "programs of a CPU are of its processor"),
        (["--device", "v5e-8", "--tensor-parallel-size", "4"], "--tensor-parallel-size 4: the device's name says"),
        (["--device", "v5e-8", "--speculative", "ngram"], "--speculative NGram"),
        (
            ["--device", "v5e-8", "--compiled-programs", "x"],
            "--compiled-programs 'x' must be left out, as programs for",
        ),
        (["--device", "v5e-8"], "--device 'v5e-8' needs its compiler"),
        (["--compiler-env", "x"], "--compiler-env 'x' needs --device"),
    ],
)
def test_what_cannot_be_compiled_for_a_device_is_refused_with_the_reason(options, message, tmp_path, monkeypatch):
    monkeypatch.setenv("JPAGED_AOT_ENVS", str(tmp_path))
    result = CliRunner().invoke(app, ["compile", "qwen3-0.6b", "--out", str(tmp_path / "out"), *options])
    said = " ".join(result.output.replace("\u2502", "").split())
    assert result.exit_code == 2 and message in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("device", [[], ["--device", "v5e-8"]])
def test_programs_for_adapters_are_asked_for_by_the_settings_of_the_engine(device, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("jpaged.planning.compile_programs_for", lambda *given, **more: asked.append(more) or (1, 1))
    monkeypatch.setattr("jpaged.LLM.compile_programs", lambda *given, **more: asked.append(more) or (1, 1))
    adapters = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"]
    result = CliRunner().invoke(app, ["compile", "m", "--out", str(tmp_path / "out"), *device, *adapters])
    assert result.exit_code == 0, result.output
    (settings,) = asked
    assert (settings["enable_lora"], settings["max_loras"], settings["max_lora_rank"]) == (True, 2, 8)
