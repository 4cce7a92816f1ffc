"""A setting is one field: the engine checks it, the command line takes it and vLLM's name for it works."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass, replace

import pytest
import typer
from typer.testing import CliRunner

from jpaged.cli import engine_options
from jpaged.config import EngineConfig, SizedConfig
from jpaged.setting import (
    Affects,
    Flag,
    Need,
    affecting,
    check_needs,
    choice,
    refuse,
    setting,
    settings_of,
    text,
    whole,
    with_facts,
)
from jpaged.validation import optional, real, switch


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


# ---------------------------------------------------------------- what a value affects, needs and is refused by


def made(**described):
    """Return a class of settings with a model; some are described as `Setting`s, others are fields."""
    names = [(name, object, one) for name, one in described.items()]
    return make_dataclass("Made", [("model", str), *names], kw_only=True)


@pytest.mark.parametrize("name", settings_of(EngineConfig))
def test_any_setting_that_does_not_say_what_it_affects_fails_by_name(name):
    known = settings_of(EngineConfig)
    every = {one: field(default=None, metadata={"setting": known[one]}) for one in known}
    every[name] = field(default=None, metadata={"setting": replace(known[name], affects=None)})
    with pytest.raises(
        TypeError, match=rf"^Made\.{name}: setting\(\.\.\.\) must say what the value affects: affects=Aff"
    ):
        with_facts(made(**every))


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (setting(3, whole(1)), r"Made\.depth: setting\(\.\.\.\) must say what the value affects"),
        (setting(3, affects="programs"), r"Made\.depth: setting\(\.\.\.\) must say what the value affects"),
        (setting(factory=dict), r"Made\.depth: setting\(\.\.\.\) must say what the value affects"),
        (3, r"Made\.depth must be made by setting\(\.\.\.\)"),
        (field(default_factory=list), r"Made\.depth must be made by setting\(\.\.\.\)"),
        (setting(3, affects=Affects.STEPS, needs=Need("deep")), r"Made\.depth needs, or is refused by, 'deep'"),
        (setting(3, affects=Affects.STEPS, refused={"hosts": "why"}), r"Made\.depth needs, or is refused by, 'hosts'"),
    ],
)
def test_a_class_of_settings_with_a_field_that_says_too_little_is_refused(one, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        with_facts(made(depth=one))


@with_facts
@dataclass(frozen=True, kw_only=True)
class Described:
    """Settings with all facts."""

    model: str
    depth: int = setting(3, whole(1), affects=Affects.PROGRAMS | Affects.BLOCKS)
    quiet: bool = setting(False, switch, affects=Affects.NOTHING, refused={"replicas": "they talk", "plans": "no"})
    share: float | None = setting(
        None, affects=Affects.STEPS, needs=(Need("quiet"), Need("depth", (3, 4), "it is new"))
    )

    def __post_init__(self) -> None:
        check_needs(self)


@dataclass(frozen=True, kw_only=True)
class Sized(Described):
    """The same, with a value for one."""

    depth: int


def test_the_settings_that_affect_something_are_found_also_where_a_class_has_their_sizes():
    for config in (Described, Sized):
        assert affecting(config, Affects.PROGRAMS) == affecting(config, Affects.BLOCKS) == ("depth",)
        assert affecting(config, Affects.PROGRAMS | Affects.STEPS) == ("depth", "share")
        assert affecting(config, Affects.NOTHING) == ()
    assert settings_of(SizedConfig) == settings_of(EngineConfig)


@pytest.mark.parametrize("config", [Described, Sized])
def test_a_setting_that_lacks_what_it_needs_is_refused_with_both_values(config):
    config(model="m", depth=4, quiet=True, share=0.5)
    config(model="m", depth=7)
    with pytest.raises(ValueError, match=r"^share=0\.5 needs quiet$"):
        config(model="m", depth=3, share=0.5)
    with pytest.raises(ValueError, match=r"^share=0\.5 needs depth=3 or 4, not 5: it is new$"):
        config(model="m", depth=5, quiet=True, share=0.5)


@pytest.mark.parametrize("config", [Described, Sized])
def test_a_setting_is_refused_by_what_it_names_unless_it_has_its_default(config):
    refuse(config(model="m", depth=5), "replicas", "needs one")
    refuse(config(model="m", depth=5, quiet=True), "several hosts", "needs one")
    with pytest.raises(ValueError, match=r"^quiet=True needs one: they talk$"):
        refuse(config(model="m", depth=5, quiet=True), "replicas", "needs one")


def test_whatever_a_replayed_setting_needs_is_replayed_too():
    """Else a replay would be refused: it has the defaults of all settings that are not replayed."""
    known, replayed = settings_of(EngineConfig), affecting(EngineConfig, Affects.PROGRAMS | Affects.STEPS)
    needed = {need.setting for name in replayed for need in known[name].needs}
    assert needed <= set(replayed)


# ---------------------------------------------------------------- checks


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
