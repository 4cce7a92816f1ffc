"""What a setting's field says it affects, needs and is refused by is what the engine does, for each setting.

Another value of a setting is the first of `VALUES` that its check takes, so that a new setting is covered by its field.
"""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest

from jpaged import ImageSources, NGram, PyramidKV
from jpaged.config import EngineConfig, SizedConfig
from jpaged.engine.builder import build_engine
from jpaged.engine.program_folder import engine_facts, with_compiled_pool
from jpaged.engine.saved_state.identity import pool_difference, pool_facts
from jpaged.engine.saved_state.keeper import settings_data
from jpaged.engine.saved_state.keeper import settings_of as restored
from jpaged.engine.sizes import sized
from jpaged.engine.step_dump import replay_step
from jpaged.engine.whole_prompts import for_whole_prompts
from jpaged.execution.compile.store import ProgramStore
from jpaged.execution.mesh import make_mesh
from jpaged.planning import compile_programs_for, plan
from jpaged.setting import Affects, Need, affecting, refuse, setting, settings_of, whole, with_facts

SETTINGS = settings_of(EngineConfig)
HINTS = get_type_hints(EngineConfig)
VALUES: tuple[Any, ...] = (True, False, 32, 0.5, "text", "int8", "priority", "lru", "swap", "bfloat16")
VALUES += (
    ("no", "yes"),
    {"name": "folder"},
    {"image": 2},
    {"reasoning_end_str": "Enough."},
    NGram(),
    PyramidKV(budget=64),
    ImageSources(folders=["/"]),
)
IN_0_3 = """
    cumulative_logprobs data_parallel_size deterministic dtype block_size enable_expert_parallel enable_lora kv_budget
    kv_cache_dtype language_model_only max_lora_rank max_loras max_model_len max_num_batched_tokens max_num_seqs
    quantization speculative state_checkpoint_interval tensor_parallel_size
"""
"""Settings in the manifests of compiled programs that jpaged 0.3 wrote."""

each_setting = pytest.mark.parametrize("name", SETTINGS)


class Reached(Exception):
    """Raised by the call that follows a refusal."""


def reached(*args: Any, **more: Any) -> Any:
    raise Reached


def taken(name: str, *, but: tuple[Any, ...] = ()) -> Any:
    """Return a value that a setting may have, other than its default and `but`."""
    for value in (*VALUES, *get_args(HINTS[name]), None):
        try:
            found = SETTINGS[name].check(name, value)
        except (TypeError, ValueError):
            continue
        if found not in but:
            return found
    raise AssertionError(f"VALUES has no other value of {name}")


def fitting(need: Need) -> Any:
    """Return a value of the setting that something needs."""
    return need.values[0] if need.values else other(need.setting)


def other(name: str) -> Any:
    return taken(name, but=(SETTINGS[name].default(),))


def with_needs(name: str, value: Any) -> dict[str, Any]:
    """Return a setting, and all that it needs where the value is not its default."""
    found = {name: value}
    for need in SETTINGS[name].needs if value != SETTINGS[name].default() else ():
        found |= with_needs(need.setting, fitting(need))
    return found


def changed(name: str) -> dict[str, Any]:
    """Return another value of a setting, with all that it needs."""
    return with_needs(name, other(name))


def given(settings: dict[str, Any]) -> list[str]:
    return [name for name, value in settings.items() if value != SETTINGS[name].default()]


def refusal(settings: dict[str, Any], by: str, message: str) -> Any:
    """Expect the refusal of settings, or that they come as far as `Reached`."""
    refused = [name for name in given(settings) if by in SETTINGS[name].refused]
    if not refused:
        return pytest.raises(Reached)
    reasons = "|".join(f"{name}=.* {message}: {re.escape(SETTINGS[name].refused[by])}" for name in refused)
    return pytest.raises(ValueError, match=f"^({reasons})$")


# ---------------------------------------------------------------- needs and refusals


@each_setting
def test_a_setting_with_all_that_it_needs_is_taken(name):
    assert getattr(EngineConfig(model="m", **changed(name)), name) == other(name)


@pytest.mark.parametrize(
    ("name", "need"), [pytest.param(n, need, id=f"{n} {need}") for n, one in SETTINGS.items() for need in one.needs]
)
def test_a_setting_without_one_that_it_needs_is_refused_by_both_names(name, need):
    bad = taken(need.setting, but=need.values) if need.values else SETTINGS[need.setting].default()
    settings = changed(name) | with_needs(need.setting, bad)
    with pytest.raises(ValueError, match=f"^{name}=.* needs {re.escape(str(need))}") as error:
        EngineConfig(model="m", **settings)
    assert not need.values or isinstance(bad, bool) or f", not {bad!r}" in str(error.value)
    assert str(error.value).endswith(need.why)


@each_setting
def test_replicas_refuse_a_setting_that_says_so(name):
    settings = {"data_parallel_size": 2} | changed(name)
    with refusal(settings, "replicas", f"needs data_parallel_size=1, not {settings['data_parallel_size']}"):
        EngineConfig(model="m", **settings)
        reached()


@each_setting
def test_several_hosts_refuse_a_setting_that_says_so_in_every_process(name, monkeypatch):
    failures: list[Exception] = []
    monkeypatch.setattr("jpaged.engine.builder.join", lambda config: SimpleNamespace(fail=failures.append))
    monkeypatch.setattr("jpaged.engine.builder.make_mesh", reached)
    with refusal(changed(name), "several hosts", "needs one process, not several hosts") as error:
        build_engine(EngineConfig(model="m", **changed(name)))
    assert failures == [error.value]


@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in ("max_model_len", "max_num_seqs")])
def test_plans_refuse_a_setting_that_says_so(name, monkeypatch):
    monkeypatch.setattr("jpaged.planning.planner.Question", SimpleNamespace(of=reached))
    with (
        refusal(changed(name), "plans", "must be left out, as plans are made without")
        if name != "tensor_parallel_size"
        else pytest.raises(ValueError, match=r"^tensor_parallel_size=32: the device's name says how many$")
    ):
        plan("m", "v5e-1", **changed(name))


@each_setting
def test_programs_for_absent_devices_refuse_a_setting_that_says_so(name, monkeypatch, tmp_path):
    monkeypatch.setattr("jpaged.planning.programs_for.compiler_python", reached)
    message = "must be left out, as programs for another device are compiled without"
    with (
        refusal(changed(name), "programs for absent devices", message)
        if name != "tensor_parallel_size"
        else pytest.raises(ValueError, match=r"^tensor_parallel_size=32: the device's name says how many$")
    ):
        compile_programs_for("m", "v5e-1", tmp_path / "programs", **changed(name))


@each_setting
def test_models_without_kv_refuse_a_setting_that_says_so(name):
    asked = EngineConfig(model="m", **changed(name))
    message = "does not go with m, which encodes each prompt in one step and keeps no KV, so leave it out"
    with refusal(changed(name), "models without KV", message):
        for_whole_prompts(sized(asked, "cpu", 0), asked, SimpleNamespace(longest_prompt=64))
        reached()


def test_a_refusal_quotes_no_more_than_the_beginning_of_a_long_value():
    with pytest.raises(
        ValueError, match=r"^images=ImageSources\(.*\.\.\..* must be left out: no prompt is read$"
    ) as error:
        refuse(EngineConfig(model="m", images=ImageSources(hosts=("a" * 50,) * 50)), "plans", "must be left out")
    assert len(str(error.value)) < 400


# ---------------------------------------------------------------- what a value affects


def facts_of_programs(config: SizedConfig, mesh: Any) -> dict[str, Any]:
    spec = SimpleNamespace(device_bytes=1 << 20)
    sizes = {"dtype": config.dtype, "max_model_len": config.max_model_len}
    return engine_facts(config, family=EngineConfig, model="", mesh=mesh, spec=spec, params={}, **sizes)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A folder of no programs, of an engine with the default settings, and what is refused of others."""
    mesh, folder = make_mesh(1), tmp_path_factory.mktemp("compiled") / "programs"
    facts = facts_of_programs(sized(EngineConfig(model="m"), "cpu", 0), mesh)
    ProgramStore(folder, mesh, facts).write()
    return folder, mesh, facts


def test_facts_of_programs_are_the_settings_that_affect_them(programs):
    names = {name.removeprefix("settings.") for name in programs[2] if name.startswith("settings.")}
    assert names == set(affecting(EngineConfig, Affects.PROGRAMS)) >= set(IN_0_3.split())


@each_setting
def test_programs_in_a_folder_go_with_other_settings_that_do_not_affect_them(name, programs):
    folder, mesh, _ = programs
    config = sized(EngineConfig(model="m", **changed(name) | {"compiled_programs": str(folder)}), "cpu", 0)
    plain = sized(EngineConfig(model="m"), "cpu", 0)
    named = "|".join(
        one
        for one in affecting(EngineConfig, Affects.PROGRAMS)
        if getattr(config, one) != getattr(plain, one) and not SETTINGS[one].from_model
    )
    with pytest.raises(ValueError, match=rf"settings\.({named})=") if named else nullcontext():
        with_compiled_pool(config, mesh)


def facts_of_pool(kind: type[EngineConfig] = EngineConfig, **settings: Any) -> dict[str, Any]:
    spec = SimpleNamespace(layout=SimpleNamespace(groups=()), views=(), dtype="float32", shards=1)
    config = kind(model="m", **settings)
    return pool_facts(config, {"layout": [], "weights": []}, spec)


def test_a_pools_facts_have_the_names_that_states_of_0_2_have():
    assert facts_of_pool() == {
        "layout": [],
        "weights": [],
        "dtype": "float32",
        "shards": 1,
        "replicas": 1,
        "deterministic": False,
        "prefix_caching": True,
        "prefix_eviction": "aligned",
        "groups": [],
    }


@each_setting
def test_blocks_are_of_another_pool_where_the_value_affects_them(name):
    """What the pool's layout shows is compared there, under the name that the setting has among its facts."""
    settings, here = changed(name), facts_of_pool()
    blocks = [one for one in given(settings) if one in affecting(EngineConfig, Affects.BLOCKS)]
    names = {SETTINGS[one].saved_as or one for one in blocks}
    assert names <= here.keys()
    shown = set(pool_difference(here, facts_of_pool(**settings), EngineConfig))
    assert shown == names - {"layout", "weights", "dtype", "groups"}


def test_a_state_from_before_there_was_a_setting_has_its_default():
    before = {name: value for name, value in facts_of_pool().items() if name != "prefix_eviction"}
    assert pool_difference(before, facts_of_pool(), EngineConfig) == []
    assert pool_difference(before, facts_of_pool(prefix_eviction="lru"), EngineConfig) == ["prefix_eviction"]


def test_only_a_setting_that_affects_blocks_says_where_that_is_seen():
    assert all(name in affecting(EngineConfig, Affects.BLOCKS) for name, one in SETTINGS.items() if one.saved_as)
    assert all(name in affecting(EngineConfig, Affects.PROGRAMS) for name, one in SETTINGS.items() if one.from_model)


@each_setting
def test_a_saved_state_keeps_the_value(name):
    config = EngineConfig(model="m", **changed(name))
    assert EngineConfig(**restored(json.loads(json.dumps(settings_data(config))))) == config


@each_setting
def test_a_replay_takes_the_value_that_affects_a_step_and_no_other(name, monkeypatch):
    def stop(config: EngineConfig) -> None:
        raise Reached(config)

    there = EngineConfig(model="m", **changed(name))
    facts = {"pool": {"device_bytes": 4096}, "settings": settings_data(there)}
    facts["model"] = dict.fromkeys(("name", "config", "layout", "weights"))
    monkeypatch.setattr("jpaged.engine.step_dump.DumpedStep.read", lambda path: SimpleNamespace(facts=facts))
    monkeypatch.setattr("jpaged.engine.step_dump.build_engine", stop)
    with pytest.raises(Reached) as made:
        replay_step(Path("step"))
    (config,) = made.value.args
    kept = affecting(EngineConfig, Affects.PROGRAMS | Affects.STEPS)
    expected = {one: getattr(there, one) for one in kept} | {"kv_cache_memory_bytes": 4096}
    assert config == replace(EngineConfig(model="m"), **expected)


# ---------------------------------------------------------------- a new setting is one field


SIZES = {"block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 64}


@with_facts
@dataclass(frozen=True, kw_only=True)
class More(SizedConfig):
    """The settings of an engine, and a new one."""

    depth: int = setting(
        3,
        whole(1),
        affects=Affects.PROGRAMS | Affects.BLOCKS,
        needs=Need("enable_prefix_caching", (True,), "it is of the cache"),
        refused={"replicas": "they are flat", "several hosts": "hosts are flat", "models without KV": "it is of KV"},
    )


def test_the_engine_follows_a_new_setting_by_its_field_alone(monkeypatch):
    with pytest.raises(ValueError, match=r"^depth=0 must be at least 1"):
        More(model="m", **SIZES, depth=0)
    with pytest.raises(ValueError, match=r"^depth=4 needs enable_prefix_caching=True: it is of the cache$"):
        More(model="m", **SIZES, depth=4, enable_prefix_caching=False)
    with pytest.raises(ValueError, match=r"^depth=4 needs data_parallel_size=1, not 2: they are flat$"):
        More(model="m", **SIZES, depth=4, data_parallel_size=2)
    deep, plain = More(model="m", **SIZES, depth=4), More(model="m", **SIZES)
    with pytest.raises(ValueError, match=r"^depth=4 does not go with m, .*: it is of KV$"):
        for_whole_prompts(deep, deep, SimpleNamespace(longest_prompt=64))
    monkeypatch.setattr("jpaged.engine.builder.join", lambda config: SimpleNamespace(fail=lambda error: None))
    with pytest.raises(ValueError, match=r"^depth=4 needs one process, not several hosts: hosts are flat$"):
        build_engine(deep)
    ours, theirs = (facts_of_programs(one, make_mesh(1)) for one in (deep, plain))
    assert {name for name, value in ours.items() if theirs[name] != value} == {"settings.depth"}
    before = facts_of_pool()
    assert pool_difference(before, facts_of_pool(More, **SIZES), More) == []
    assert pool_difference(before, facts_of_pool(More, **SIZES, depth=4), More) == ["depth"]
