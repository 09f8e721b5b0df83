#!/usr/bin/env bash
# Run the tests that start no workers with the oldest versions that setup.cfg allows, in .venv-oldest.
#
#   scripts/test_oldest.sh [ARGUMENTS OF pytest]
#
# Settings: see scripts/setup_env.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

oldest=$(sed -nE 's/^ *(tensorflow|keras)>=([0-9.]+)$/\1==\2.*/p' setup.cfg)
export TF_DGC_WITH=${oldest//$'\n'/ } TF_DGC_VENV=.venv-oldest
export TF_DGC_NO_HOROVOD=1 TF_DGC_REQUIRE_HOROVOD=0
exec scripts/test.sh -m "not processes and not slow and not extended" "$@"
