#!/usr/bin/env bash
# check.sh VENV: lint, types, then all tests. What CI runs.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$1/bin

"$bin/ruff" check src tests
"$bin/ruff" format --check src tests
"$bin/mypy"
"$bin/python" -m pytest --quiet --numprocesses 2 --dist loadfile
