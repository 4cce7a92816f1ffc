"""Checks that the compiled programs of a folder are those of an engine like the one that loads them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jpaged.config import EngineConfig, SizedConfig
from jpaged.engine.memory_plan import resolve_max_model_len
from jpaged.execution import PoolSpec
from jpaged.execution.compile.facts import code_digest, machine_facts, weight_facts
from jpaged.execution.compile.store import Facts, ProgramStore, check_fact, make_calls_known, read_manifest
from jpaged.execution.params import num_compact
from jpaged.loading import LoadedModel
from jpaged.loading.registry import is_encoder
from jpaged.setting import Affects, affecting, settings_of
from jpaged.speculative import DraftModel, Head


def with_compiled_pool(config: SizedConfig, mesh: Mesh) -> SizedConfig:
    """Return settings with the pool's size in `config.compiled_programs`, unless they already give a size.

    All facts are compared that need no model, and the loops of a CPU that lie there are made known, since reading
    weights runs some of them.

    Raises:
        ValueError: the folder holds no programs, or those of another machine, version or settings, or `speculative` is
            a draft model.
    """
    if config.compiled_programs is None:
        return config
    check_one_model(config)
    folder = Path(config.compiled_programs)
    facts = read_manifest(folder)["facts"]
    later = _named({name: None for name, one in settings_of(type(config)).items() if one.from_model})
    unknown = {name: None for name in facts if name.startswith(("settings.", "versions"))}  # of another version
    here = unknown | machine_facts(mesh) | _named(_settings(config))
    _check(folder, facts, {name: value for name, value in here.items() if name not in later})
    make_calls_known(folder)
    if config.kv_cache_memory_bytes is not None or not isinstance(facts.get("pool_bytes"), int):
        return config
    return dataclasses.replace(config, kv_cache_memory_bytes=facts["pool_bytes"])


def check_model(config: SizedConfig, family: type, model_config: Any, dtype: Any) -> None:
    """Compare what programs depend on of a model that was opened, before its weights are read.

    Args:
        family: the model's class.
        dtype: the dtype to which the setting of this name was resolved.

    Raises:
        ValueError: the programs of `config.compiled_programs` are of another model, code, dtype or length.
    """
    if config.compiled_programs is None:
        return
    folder = Path(config.compiled_programs)
    settings: dict[str, Any] = {"dtype": str(dtype)}
    if not is_encoder(family, model_config):  # an encoder's lengths are known when it is built
        longest = resolve_max_model_len(config.max_model_len, model_config)
        settings |= {"max_model_len": longest, "max_num_batched_tokens": config.max_num_batched_tokens}
    here = {"code": code_digest(family), "model": configuration_digest(model_config)} | _named(settings)
    _check(folder, read_manifest(folder)["facts"], here)


def open_programs(
    config: SizedConfig, loaded: LoadedModel, spec: PoolSpec, max_model_len: int, collect: Path | None
) -> ProgramStore | None:
    """Return the store that an engine reads its programs from, or that collects them for `collect`; None = neither.

    Raises:
        ValueError: the programs are of another model, other settings, code, versions or another machine.
    """
    if collect is None and config.compiled_programs is None:
        return None
    facts = engine_facts(
        config,
        family=type(loaded.model),
        model=configuration_digest(loaded.config),
        dtype=loaded.dtype,
        mesh=loaded.mesh,
        spec=spec,
        max_model_len=max_model_len,
        params=loaded.params,
    )
    if collect is not None:
        return ProgramStore(collect, loaded.mesh, facts)
    assert config.compiled_programs is not None
    return ProgramStore.read(Path(config.compiled_programs), loaded.mesh, facts)


def engine_facts(
    config: SizedConfig,
    *,
    family: type,
    model: str,
    dtype: Any,
    mesh: Mesh,
    spec: PoolSpec,
    max_model_len: int,
    params: Any,
) -> Facts:
    """Return all facts, apart from shapes, on which an engine's programs depend.

    Args:
        family: the model's class.
        model: the digest of its configuration.
        dtype: the dtype to which the setting of this name was resolved; `max_model_len` likewise.
        params: the weights or their shapes.
    """
    settings = _settings(config) | {"max_model_len": max_model_len, "dtype": str(dtype)}
    # Names of weights sort after the settings that they follow from, so that an error names the setting first.
    return machine_facts(mesh) | {
        "code": code_digest(family),
        "model": model,
        "pool_bytes": spec.device_bytes,
        **_named(settings),
        "weights.exact_matrices": num_compact(params),
        **weight_facts(params),
    }


def _settings(config: SizedConfig) -> dict[str, Any]:
    return {name: plain(getattr(config, name)) for name in affecting(type(config), Affects.PROGRAMS)}


def _named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by the names that they have among facts."""
    return {f"settings.{name}": value for name, value in settings.items()}


def _check(folder: Path, facts: Facts, here: Facts) -> None:
    for name, value in sorted(here.items()):
        check_fact(folder, name, facts.get(name), value)


def check_one_model(config: EngineConfig) -> None:
    """Raise ValueError if drafts come from a draft model or head: `Facts` do not describe its weights."""
    if isinstance(config.speculative, DraftModel | Head):
        what = "draft model" if isinstance(config.speculative, DraftModel) else "head that drafts"
        raise ValueError(f"speculative={config.speculative!r}: programs of a {what} are not kept in a folder")


def plain(value: Any) -> Any:
    """Return a setting's value as facts hold it: JSON's own kinds, or a text."""
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)


def configuration_digest(model_config: Any) -> str:
    """Return a hash of a model's configuration, which does not depend on its folder's name."""
    facts = model_config.to_dict() if hasattr(model_config, "to_dict") else vars(model_config)
    left_out = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
    plain = {name: value for name, value in facts.items() if name not in left_out}
    text = json.dumps(plain, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
