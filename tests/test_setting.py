"""A setting is one field: the engine checks it, the command line takes it and vLLM's name for it works."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
import typer
from typer.testing import CliRunner

from jpaged.cli import engine_options
from jpaged.config import EngineConfig
from jpaged.setting import Flag, choice, optional, real, setting, settings_of, switch, text, whole


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """An engine's settings of which one is new."""

    depth: int = setting(3, whole(1), flag=Flag(commands="serve", least=1, help="How deep."))
    quiet: bool = setting(False, switch, flag=Flag(commands="model", help="Say less."))
    inner: float = setting(0.5, real(0.0, 1.0))
    share: float = setting(0.5, real(0.0, 1.0), flag=Flag(commands="serve", help="How much."), vllm="gpu_share")


@pytest.fixture
def shown(monkeypatch):
    """Run a command whose engine has the settings of `Tiny`; return what it was given and printed."""
    monkeypatch.setattr(engine_options, "EngineConfig", Tiny)

    def run(of, *arguments, **defaults):
        app, found = typer.Typer(), []

        @app.command()
        @engine_options.with_engine_options(of, **defaults)
        def command(*, engine: engine_options.EngineOptions) -> None:
            found.append(engine.settings())

        result = CliRunner().invoke(app, list(arguments))
        return found[0] if found else None, result.output

    return run


def test_a_new_field_with_a_flag_is_an_option_of_the_commands_that_it_names(shown):
    assert shown("serve", "--depth", "7", "--quiet") == ({"depth": 7, "quiet": True, "share": 0.5}, "")
    assert shown("batch") == ({"quiet": False}, "")
    assert "No such option" in shown("batch", "--depth", "7")[1]
    assert "How deep." in shown("serve", "--help")[1]


def test_a_command_may_name_the_settings_it_takes_and_have_other_defaults(shown):
    assert shown(("depth",)) == ({"depth": 3}, "")
    assert shown("serve", depth=9)[0] == {"depth": 9, "quiet": False, "share": 0.5}


def test_a_flag_has_vllms_name_of_its_setting_too(shown):
    assert [shown(("share",), flag, "0.25")[0] for flag in ("--share", "--gpu-share")] == [{"share": 0.25}] * 2


def test_a_flag_below_its_least_value_is_refused(shown):
    given, output = shown("serve", "--depth", "0")
    assert given is None and "greater than or equal to 1" in " ".join(output.split())


def test_every_setting_but_the_model_is_declared_with_a_check_and_a_text_below_it():
    declared = settings_of(EngineConfig)
    assert [field.name for field in fields(EngineConfig)] == ["model", *declared]
    assert all(one.check is not None for one in declared.values())


@pytest.mark.parametrize(
    ("check", "value", "message"),
    [
        (whole(2), 1, "x=1 must be at least 2"),
        (real(0.0, above=True), 0, "x=0 must be above 0"),
        (choice(("a", "b")), "c", "x='c' is not one of a, b"),
        (choice(("a", "b")), 3, "x=3 is not one of a, b"),
        (switch, 1, "x=1 must be True or False"),
        (text, " ", "x=' ' must be a non-empty string"),
        (optional(text), "", "x='' must be a non-empty string"),
    ],
)
def test_a_check_names_the_setting_its_value_and_the_limit(check, value, message):
    with pytest.raises(ValueError, match=message):
        check("x", value)


def test_a_check_gives_the_value_to_store():
    assert choice(("fp8",), {"fp8_e4m3": "fp8"})("x", "fp8_e4m3") == "fp8"
    assert optional(whole(1))("x", None) is None
