#!/usr/bin/env bash
# Builds the documentation into site/, strictly: a warning is an error. Makes or reuses .venv and installs the extra docs.
#
#   bash scripts/docs.sh              build
#   bash scripts/docs.sh serve        build and show on http://127.0.0.1:8000
#   bash scripts/docs.sh drawings     draw docs/drawings/ again, from the allocator, and the life of a request
#
# Nothing is fetched while it builds, and the site fetches nothing from other hosts: search runs in the reader's browser.
# It needs `serve` or another server; the pages themselves can be opened from the file system. DOCS_REPO_URL makes links to
# sources lead to the repository, DOCS_SITE_URL is where the site will be (with a slash at its end).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh

make_venv
install_jpaged docs
case ${1:-build} in
build | serve)
    # mkdocs-typer2 runs the program `typer`
    PATH="$PWD/$(dirname "$venv"):$PATH" NO_MKDOCS_2_WARNING=1 "$venv" -m mkdocs build --strict --clean --quiet
    if grep -rlE '<(script|img)[^>]+src="https?:|rel="(stylesheet|preconnect)"[^>]*href="https?:' site --include='*.html'; then
        echo "these pages fetch from other hosts" >&2
        exit 1
    fi
    echo "built site/index.html"
    [ "${1:-build}" = build ] || exec "$venv" -m http.server --bind 127.0.0.1 --directory site 8000
    ;;
drawings)
    "$venv" scripts/docs_life.py docs/life_of_a_request.svg
    exec "$venv" scripts/docs_drawings.py docs/drawings
    ;;
*) echo "unknown: $1; give build, serve or drawings" >&2 && exit 2 ;;
esac
