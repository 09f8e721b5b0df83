#!/usr/bin/env bash
# Check style and types and run the fast tests, which start no workers with TensorFlow.
#
#   scripts/check.sh [lint]      (lint: without the tests)
set -euo pipefail
# Neither ruff nor mypy needs Horovod, which takes minutes to build.
[ "${1:-}" != lint ] || export TF_DGC_NO_HOROVOD=1 TF_DGC_REQUIRE_HOROVOD=0
. "$(dirname "$0")/setup_env.sh"

ruff check .
ruff format --check .
mypy
[ "${1:-}" = lint ] || python -m pytest -n 2 -m "not processes and not slow and not long and not extended"
