#!/usr/bin/env bash
# Run the tests, in .venv, which is set up first where it is missing. Those marked slow
# run by `-m slow` only. Two processes of pytest share them, a class at a time.
#
#   scripts/test.sh [ARGUMENTS OF pytest]
#
# Settings: see scripts/setup_env.sh.
set -euo pipefail
. "$(dirname "$0")/setup_env.sh"

echo "[4/4] Run the tests"
python -m pytest -n 2 --dist loadscope --no-loadscope-reorder "$@"
