#!/usr/bin/env bash
# Check style and types and run the fast tests, which start no workers with TensorFlow.
#
#   scripts/check.sh [lint]      (lint: without the tests)
set -euo pipefail
. "$(dirname "$0")/setup_env.sh"

ruff check .
ruff format --check .
mypy
[ "${1:-}" = lint ] || python -m pytest -m "not processes and not slow"
