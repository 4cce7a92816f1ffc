"""Command lines of coding agents finish an edit and its test, each over its own protocol.

The server is the real one, and its model a script that `tests/server/scripted_agent.py` describes.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

URL = os.environ["JPAGED_AGENT_URL"]
FOLDER = Path(os.environ["JPAGED_AGENT_FOLDER"])
TASK = "mend sums.py and run its test"
BROKEN = "def add(a, b):\n    return a - b\n"
CHECK = "from sums import add\n\nassert add(2, 3) == 5\nprint('passed')\n"


@pytest.fixture
def finishes(tmp_path):
    """Return a function that lets an agent work, and looks whether the test passes after it and did not before."""

    def run(*command, **variables):
        (FOLDER / "sums.py").write_text(BROKEN)
        (FOLDER / "test_sums.py").write_text(CHECK)
        assert not passes()
        env = os.environ | {"HOME": str(tmp_path)} | variables
        done = subprocess.run(
            command, cwd=FOLDER, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert passes(), done.stdout
        return done.stdout

    return run


def passes():
    return subprocess.run([sys.executable, "-B", "test_sums.py"], cwd=FOLDER, capture_output=True).returncode == 0


def of_npm(name):
    return f"{os.environ['JPAGED_NPM']}/node_modules/.bin/{name}"


@pytest.mark.client("mini-swe-agent", "an edit and its test")
def test_mini_swe_agent(finishes, tmp_path):
    program = Path(sys.executable).parent / "mini"
    variables = {"OPENAI_BASE_URL": f"{URL}/v1", "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    variables |= {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"}
    options = ("-m", "openai/demo", "-t", TASK, "-y", "--exit-immediately", "-o", str(tmp_path / "steps.json"))
    assert "passed" in finishes(str(program), *options, **variables)


@pytest.mark.client("@anthropic-ai/claude-code (npm)", "an edit and its test")
def test_claude_code(finishes):
    variables = {"ANTHROPIC_BASE_URL": URL, "ANTHROPIC_API_KEY": "none", "IS_SANDBOX": "1"}
    variables |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
    options = ("-p", TASK, "--model", "claude-demo", "--allowedTools", "Read,Edit,Bash")
    assert "its test passes" in finishes(of_npm("claude"), *options, **variables)


@pytest.mark.client("@openai/codex (npm)", "an edit and its test")
def test_codex(finishes, tmp_path):
    provider = f'model_providers.demo={{name="demo",base_url="{URL}/v1",env_key="DEMO_KEY",wire_api="responses"}}'
    options = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "demo")
    settings = ("-c", "model_provider=demo", "-c", provider)
    variables = {"CODEX_HOME": str(tmp_path), "DEMO_KEY": "none"}
    assert "its test passes" in finishes(of_npm("codex"), *options, *settings, TASK, **variables)
