#!/usr/bin/env bash
# Set up everything in .venv, then train handwritten digits on two workers.
#
#   scripts/quickstart.sh [ARGUMENTS OF examples/digits.py]
#
# Settings: see scripts/setup_env.sh.
set -euo pipefail
. "$(dirname "$0")/setup_env.sh"

if [ -z "$horovod_missing" ]; then
  launch=(horovodrun -np 2)
  how="horovodrun"
else
  launch=(python scripts/run_local.py -n 2 --)
  how="scripts/run_local.py over TensorFlow's own collectives (no Horovod)"
fi
verbose=2             # a line per epoch ...
[ -t 1 ] && verbose=1 # ... or, on a terminal, a progress bar
# What TensorFlow logs of every CPU: most of it stops at level 3, not the earliest.
export TF_CPP_MIN_LOG_LEVEL=3
export PYTHONHASHSEED=0 # sets are gone through in one order on all workers
noise='I0000 00:00:|All log messages before absl::InitializeLog'
echo "[4/4] Train examples/digits.py on two workers, with $how"
"${launch[@]}" python examples/digits.py --verbose "$verbose" "$@" \
  2> >(grep --line-buffered -vE "$noise" >&2)
