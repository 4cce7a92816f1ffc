"""What a public host reads beside the code agrees with the code: versions, scripts, folders."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import thorough
import yaml

import jpaged

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def workflow(name):
    found = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())
    return found | {"on": found.pop(True)}  # YAML 1.1 reads the word as a truth value


def test_the_matrix_holds_every_python_that_is_promised_and_both_ends_of_jax():
    matrix = workflow("tests.yml")["jobs"]["versions"]["strategy"]["matrix"]
    promised = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", one)]
    assert matrix["python"] == promised
    assert PROJECT["requires-python"] == f">={promised[0]}"
    assert matrix["jax"] == ["0.10.0", ""] and "jax>=0.10" in PROJECT["dependencies"]


def test_the_lower_end_of_every_dependency_is_installed_and_tried_by_a_job():
    command = [sys.executable, str(ROOT / "scripts" / "lowest_versions.py")]
    pinned = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.replace("==", ">=") for line in pinned] == PROJECT["dependencies"]
    job = workflow("tests.yml")["jobs"]["lowest"]
    (step,) = [step for step in job["steps"] if step.get("env", {}).get("LOWEST")]
    assert step["run"] == "bash scripts/test_versions.sh" and "strategy" not in job
    (python,) = [step["with"]["python-version"] for step in job["steps"] if "setup-python" in step.get("uses", "")]
    assert PROJECT["requires-python"] == f">={python}"
    script = (ROOT / "scripts" / "test_versions.sh").read_text()
    assert "scripts/lowest_versions.py" in script and "PIP_CONSTRAINT" in script
    named = re.findall(r"\btests/[\w/.]+", script)
    assert "tests/test_dependencies.py" in named and all((ROOT / path).exists() for path in named)


def test_extras_that_only_a_nightly_run_has_are_asked_for_where_nothing_may_be_missing():
    """`pytest.importorskip` skips such a test even there; `wanted.module` fails it."""
    found = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    names = "tunix|litellm|langchain_openai|anthropic"
    assert [name for name, text in found.items() if re.search(rf'importorskip\("({names})\b', text)] == []
    asked = {module for text in found.values() for module in re.findall(r'wanted\.module\("(\w+)', text)}
    assert set(names.split("|")) <= asked


@pytest.mark.parametrize("name", [path.name for path in WORKFLOWS])
def test_workflows_run_scripts_that_exist_with_the_rights_they_need(name):
    text = (ROOT / ".github" / "workflows" / name).read_text()
    scripts = re.findall(r"\bbash (\S+)", text)
    assert scripts and all((ROOT / script).is_file() for script in scripts)
    found = workflow(name)
    assert found["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in found["jobs"].values())
    assert "secrets." not in text


def test_every_commit_measures_what_an_import_takes_against_at_most_twice_the_goals():
    text = (ROOT / "scripts" / "check_wheel.sh").read_text()
    (limits,) = re.findall(r"import_time\.py\S? --most (\S+) --most-help (\S+)", text)
    assert float(limits[0]) <= 2 * 0.15 and float(limits[1]) <= 2 * 0.4
    assert "bash scripts/check_wheel.sh --pure" in (ROOT / ".ci" / "run").read_text()
    assert "bash scripts/check_wheel.sh\n" in (ROOT / ".github" / "workflows" / "tests.yml").read_text(), "at night"


def test_each_test_that_is_left_to_the_night_is_there():
    for test in thorough.for_the_night():
        file, name = re.fullmatch(r"([^:]+)::(\w+)(?:\[.*\])?", test).groups()
        assert f"\ndef {name}(" in (ROOT / file).read_text(), test


def test_only_a_tag_is_published_and_by_trusted_publishing():
    publish = workflow("release.yml")["jobs"]["publish"]
    assert publish["if"] == "github.ref_type == 'tag'" and publish["needs"] == "build"
    assert publish["permissions"] == {"id-token": "write"}


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == jpaged.__version__ and citation["license"] == PROJECT["license"]
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert f"## {citation['version']} - {citation['date-released']}\n" in changes


def test_versions_of_the_changelog_are_dated_newest_first_and_short():
    changes = (ROOT / "CHANGELOG.md").read_text()
    heads = re.findall(r"^## (.+)$", changes, re.MULTILINE)
    released = heads[heads[0].startswith("Unreleased") :]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ - (\d{4}-\d\d-\d\d|not published)", head) for head in released)
    assert released[0].startswith(f"{jpaged.__version__} - ")
    assert (ROOT / "docs" / "releases" / f"{jpaged.__version__}.md").is_file()
    versions = [tuple(map(int, head.split(" ")[0].split("."))) for head in released]
    assert versions == sorted(versions, reverse=True)
    assert len(changes.encode()) <= 9000


def test_a_release_fails_while_pyproject_names_no_repository(tmp_path):
    steps = workflow("release.yml")["jobs"]["build"]["steps"]
    (step,) = [one for one in steps if "Repository" in one.get("run", "")]
    assert step["if"] == "github.ref_type == 'tag'"
    for lines, fails in (("", True), ('[project.urls]\nRepository = "https://github.com/some-one/jpaged"\n', False)):
        (tmp_path / "pyproject.toml").write_text(f"[project]\n{lines}")
        done = subprocess.run(["bash", "-e", "-c", step["run"]], cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode != 0) == fails, done.stderr
        assert not fails or "sync.py" in done.stderr


@pytest.mark.parametrize(("page", "lines", "size"), [("README.md", 150, 9000), ("ARCHITECTURE.md", 150, 10_000)])
def test_entrance_pages_are_short(page, lines, size):
    text = (ROOT / page).read_text()
    assert len(text.splitlines()) <= lines and len(text.encode()) <= size


def test_contributors_are_sent_to_tests_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    places = re.findall(r"\b(?:tests|scripts|jpaged)/[\w/]+(?:\.\w+)?", text)
    assert len(places) > 10
    assert [place for place in places if not (ROOT / place).exists()] == []


def test_hooks_before_a_commit_are_pinned_and_come_from_pypi():
    found = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in found["repos"] for hook in repo["hooks"]]
    assert {repo["repo"] for repo in found["repos"]} == {"local"}
    assert {"ruff", "ruff-format", "trailing-whitespace"} <= {hook["id"] for hook in hooks}
    for hook in hooks:
        assert all(re.fullmatch(r"[\w-]+==[\d.]+", needed) for needed in hook["additional_dependencies"]), hook["id"]


def test_tasks_run_what_is_there():
    lines = re.findall(r"^    (?!@)(.+)$", (ROOT / "justfile").read_text(), re.MULTILINE)
    assert len(lines) > 8
    for line in lines:
        scripts = re.findall(r"\bbash (\S+)", line)
        assert scripts or line.startswith(".venv/bin/"), line
        assert all((ROOT / script).is_file() for script in scripts), line
        assert all((ROOT / folder).is_dir() for folder in re.findall(r"\btests/\w+", line)), line


def test_the_site_is_built_on_a_public_host_and_its_tools_are_in_an_extra():
    steps = workflow("tests.yml")["jobs"]["docs"]["steps"]
    assert any(step.get("run") == "bash scripts/docs.sh" for step in steps)
    assert any(one.startswith("mkdocs-material") for one in PROJECT["optional-dependencies"]["docs"])
    assert "bash scripts/docs.sh" in (ROOT / ".ci" / "run").read_text()


def test_the_nightly_run_of_a_public_host_installs_the_extras_without_which_tests_are_skipped():
    steps = workflow("tests.yml")["jobs"]["nightly"]["steps"]
    (extras,) = (step["env"]["EXTRAS"].split(",") for step in steps if "EXTRAS" in step.get("env", {}))
    skipped = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        skipped |= set(re.findall(r'reason="needs the extra (\w+)"', path.read_text()))
    assert (
        skipped and {*skipped, "tunix"} <= {*extras, "browser"} and set(extras) <= set(PROJECT["optional-dependencies"])
    )


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_files_for_the_host_follow_its_schemas(path):
    """Those that check-jsonschema brings along; it has none for issue forms, whose fields are told here."""
    found = yaml.safe_load(path.read_text())
    if path.parent.name == "ISSUE_TEMPLATE" and path.name != "config.yml":
        assert {"name", "description", "body"} <= set(found)
        assert all(
            field["type"] in ("input", "textarea", "dropdown", "checkboxes", "markdown") for field in found["body"]
        )
        assert len({field["id"] for field in found["body"]}) == len(found["body"])
        assert all(field["attributes"]["label"] for field in found["body"])
        return
    schemas = {"workflows": "vendor.github-workflows", ".github": "vendor.dependabot"}
    if (schema := schemas.get(path.parent.name)) is None:
        assert set(found) <= {"blank_issues_enabled", "contact_links"}
        return
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_nightly_run_has_the_clients_and_the_browser_without_which_tests_are_skipped():
    steps = workflow("tests.yml")["jobs"]["nightly"]["steps"]
    assert any(re.search(r"apt-get install .*\bchromium\b", step.get("run", "")) for step in steps)
    (tests,) = [step for step in steps if "scripts/test.sh --nightly" in step.get("run", "")]
    assert tests["env"]["JPAGED_NOTHING_MISSING"] == "1" and "nightly" in tests["env"]["EXTRAS"].split(",")
    assert "extras=nightly" in (ROOT / "scripts" / "test.sh").read_text()
    extras = PROJECT["optional-dependencies"]
    needed = [one for name in ("nightly", "browser") for one in extras[name]]
    installed = {re.split(r"[>=\[]", one)[0].replace("-", "_") for one in needed}
    files = [path.read_text() for path in (ROOT / "tests" / "server").glob("test_*.py")]
    asked = {name for text in files for name in re.findall(r'wanted\.module\("(\w+)', text)}
    assert asked == {"anthropic", "litellm", "langchain_openai", "playwright"} and asked <= installed


def test_another_version_is_tried_in_an_environment_elsewhere_and_named(tmp_path):
    """A stand-in for the environment's Python runs no pip and no pytest."""
    python = tmp_path / "envs" / ".venv-{}.{}-jaxnewest".format(*sys.version_info) / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\necho "$@"\n[ "$2" != pytest ] || exit 5\n'
    )
    python.chmod(0o755)
    summary = tmp_path / "summary"
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "ENVS": str(tmp_path / "envs"),
        "GITHUB_STEP_SUMMARY": str(summary),
    }
    for name in ("LOWEST", "JAX", "EXTRAS", "TOOLS"):
        environment.pop(name, None)
    command = ["bash", ROOT / "scripts" / "test_versions.sh", "tests/memory", "-x"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 5, "the tests' own status"
    installed, said, ran = done.stdout.splitlines()
    assert installed.endswith("-e .[test] jax") and ran == "-m pytest -m not aot tests/memory -x"
    assert f"Python {platform.python_version()} and jpaged" in said and f"jax {version('jax')}" in said
    assert summary.read_text() == said + "\n"


def test_the_night_runs_everything_with_the_oldest_python_and_the_newest():
    job = workflow("tests.yml")["jobs"]["nightly"]
    matrix = workflow("tests.yml")["jobs"]["versions"]["strategy"]["matrix"]["python"]
    assert job["strategy"]["matrix"]["python"] == [matrix[0], matrix[-1]]
    assert job["container"]["image"] == "python:${{ matrix.python }}-bookworm"
    assert "say_versions" in (ROOT / "scripts" / "test.sh").read_text()
