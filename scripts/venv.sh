# shellcheck shell=bash
# Sourced by the other scripts, from the repository's root: a working environment in .venv.
# PYTHON chooses the interpreter that .venv is made with (3.11 or later); the default is python3.
venv=.venv/bin/python

# make_venv: create .venv if there is none.
make_venv() {
    local python=${PYTHON:-python3}
    [ -x "$venv" ] && return
    if ! command -v "$python" >/dev/null; then
        echo "$python was not found; jpaged needs Python 3.11 or later (set PYTHON to choose one)" >&2
        return 1
    fi
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "$python is $("$python" -V 2>&1); jpaged needs 3.11 or later (set PYTHON to choose one)" >&2
        return 1
    fi
    echo "making .venv with $("$python" -V 2>&1)"
    "$python" -m venv .venv
}

# install_jpaged [EXTRA]: install jpaged and JAX for CPU, editable, with the extra if one is given.
# The stamp of an installation is a copy of the pyproject.toml that was installed.
install_jpaged() {
    local stamp=.venv/jpaged-installed
    local wanted=$stamp${1:+-$1}
    cmp -s pyproject.toml "$wanted" && return
    echo "installing jpaged${1:+ with the $1 extra} and JAX for CPU into .venv"
    "$venv" -m pip install --quiet --disable-pip-version-check -e ".${1:+[$1]}"
    cp pyproject.toml "$wanted"
    cp pyproject.toml "$stamp"
}

# make_aot_envs: environments with the compilers of hardware this machine lacks, both at once, where JPAGED_AOT_ENVS says.
make_aot_envs() {
    export JPAGED_AOT_ENVS=${JPAGED_AOT_ENVS:-${XDG_CACHE_HOME:-$HOME/.cache}/jpaged/aot-envs}
    local target made=()
    for target in tpu cuda; do
        PYTHON=$PWD/$venv bash scripts/aot_env.sh "$target" "$JPAGED_AOT_ENVS/$target" ||
            echo "the $target compiler could not be installed in $JPAGED_AOT_ENVS/$target: its tests will be skipped" >&2 &
        made+=($!)
    done
    wait "${made[@]}"
}
