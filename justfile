# Tasks of a contributor, by just (https://just.systems): `just` lists them. Each is a script or one line that runs without it.

[private]
default:
    @just --list

# a command line's examples and the host rooms, in seconds
quick:
    .venv/bin/python -m pytest tests/memory tests/scheduling tests/text tests/cli tests/docs -k "not test_docs_code" -n 0

# tests of one room or file: just test tests/memory -k fork
test *arguments:
    .venv/bin/python -m pytest -n 0 {{ arguments }}

# style, types and the walls between rooms
check:
    .venv/bin/python -m ruff check .
    .venv/bin/python -m ruff format --check .
    .venv/bin/python -m mypy
    .venv/bin/lint-imports

# write the style that `check` asks for
format:
    .venv/bin/python -m ruff check --fix .
    .venv/bin/python -m ruff format .

# all that a commit has to pass
all:
    bash .ci/run

# everything, the long ones too
nightly:
    bash scripts/test.sh --nightly

# build the documentation into site/; `just docs serve` shows it, `just docs drawings` draws again
docs what="build":
    bash scripts/docs.sh {{ what }}

# build sdist and wheel and use the wheel as a stranger would
wheel:
    bash scripts/check_wheel.sh

# try a wheel on every guide and notebook, in empty environments
newcomer file:
    .venv/bin/python scripts/try_as_new.py {{ file }}
