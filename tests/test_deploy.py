"""Images and manifests: linted, valid for Kubernetes, closed to the world, and their flags are those of the command."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement
from typer.testing import CliRunner

from jpaged.cli import main

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
MANIFESTS = ["gpu.yaml", "tpu.yaml"]
USER = 10001
VERSIONS = ["1.30", "1.34", "1.37"]


def documents(name):
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def pod(name):
    (deployment,) = [one for one in documents(name) if one["kind"] == "Deployment"]
    return deployment["spec"]["template"]["spec"]


def test_the_dockerfile_is_clean():
    linter = Path(sysconfig.get_path("scripts")) / "hadolint"
    done = subprocess.run([linter, DEPLOY / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_image_runs_as_a_user_and_its_versions_are_pinned():
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    assert f"USER {USER}:{USER}" in lines
    (base,) = [line for line in lines if line.startswith("ARG BASE=")]
    assert base.count(".") == 2 and "latest" not in base  # a whole version
    pins = [Requirement(line) for line in (DEPLOY / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    assert all(str(pin.specifier).startswith("==") for pin in pins)
    assert {"jax", "flax", "transformers", "fastapi", "ray", "numba"} <= {pin.name for pin in pins}


@pytest.mark.parametrize("name", MANIFESTS)
@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_valid(name, version):
    for document in documents(name):
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("name", MANIFESTS)
def test_pods_may_write_only_where_they_need_to(name):
    spec = pod(name)
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == USER
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["automountServiceAccountToken"] is False
    written = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert written == {"/cache", "/tmp", "/dev/shm"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_pod_starts_a_server_with_keys_and_time_to_drain(name, tmp_path, monkeypatch):
    """The command is parsed as the container would, up to the model, which is not there."""
    spec = pod(name)
    (container,) = spec["containers"]
    args = container["args"]
    drain = float(args[args.index("--drain-seconds") + 1])
    assert spec["terminationGracePeriodSeconds"] > drain
    keys = tmp_path / "keys.json"
    keys.write_text('[{"name": "a", "key": "k"}]')
    started = {}

    def build_llm(model, **settings):
        started.update(settings, model=model)
        raise SystemExit(77)

    monkeypatch.setattr("jpaged.llm.LLM", build_llm)
    given = [str(keys) if value == "/keys/keys.json" else value for value in args]
    assert CliRunner().invoke(main.app, [*given, "--port", "0"]).exit_code == 77
    chips = container["resources"]["limits"].get("google.com/tpu", "1")
    assert started["tensor_parallel_size"] == int(chips)
    assert args[1] == started["model"]
