#!/usr/bin/env bash
# Check this package on a machine with GPUs; on others, what of it needs none.
#
#   scripts/gpu_check.sh [FOLDER]      (for logs and figures; default: gpu_check)
#
# Settings: see scripts/setup_env.sh.
set -euo pipefail
out=$(realpath -m "${1:-gpu_check}")
. "$(dirname "$0")/setup_env.sh"
mkdir -p "$out"

echo "Placement: operations of training steps that would leave a GPU"
python -m tf_dgc.lab.placement 2>"$out/placement.log" | tee "$out/placement.txt"
echo "Tests that pretend a GPU, or take another device for one"
python -m pytest -q tests/lab/test_placement.py tests/jobs/test_other_device.py \
  tests/unit/test_strategy.py tests/unit/test_horovod_names.py \
  -k "placement or OtherDevice or Gpu or Compiled" -m "not slow"

gpus=$(python -c 'import tensorflow as tf
print(len(tf.config.list_physical_devices("GPU")))' 2>"$out/devices.log")
if [ "$gpus" -eq 0 ]; then
  echo "gpu_check: TensorFlow sees no GPU on this machine: jobs, figures and placement" \
    "on a GPU were skipped"
  exit 0
fi

echo "Jobs of one and of two processes, on $gpus GPU(s)"
export TF_FORCE_GPU_ALLOW_GROWTH=true # two may share one
for workers in 1 2; do
  python scripts/run_local.py -n "$workers" -- python examples/digits.py --verbose 2 \
    >"$out/digits$workers.txt" 2>"$out/digits$workers.log"
  grep -E "accuracy|sent per|weights" "$out/digits$workers.txt"
done
echo "Laws, units and transports"
# Products rounded to 19 bits are no bug of this package.
NVIDIA_TF32_OVERRIDE=0 python -m pytest -q -n 2 -m "not processes and not slow" \
  tests/laws tests/unit
NVIDIA_TF32_OVERRIDE=0 python -m pytest -q -n 2 --dist loadscope -m "not slow" \
  tests/laws/test_transports.py tests/jobs/test_features.py
echo "Placement of a step that ran"
python scripts/gpu_placed.py 2>"$out/placed.log" | tee "$out/placed.txt"
for way in auto off; do # compiled as a whole; by single operations
  export TF_DGC_XLA=$way
  echo "Figures, TF_DGC_XLA=$way"
  python scripts/bench_step.py --no-fit --json "$out/step_$way.json" 2>"$out/step_$way.log"
  python - "$out/step_$way.json" <<'EOF'
import json, sys

import tensorflow as tf

found = json.load(open(sys.argv[1]))
gpu = tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[0])
# The bare update reads u, v and g, and writes u and v: 20 bytes an element.
bare = found["bare_seconds"]
bandwidth = 20 * found["bare_elements"] / bare
print(f"\n| {gpu.get('device_name', 'GPU')} | seconds | bare updates | bytes / (elements * 4) |")
print("|---|---|---|---|")
for name in ("bare", "step", "many_tensors", "apply", "apply_many_tensors"):
    seconds = found[f"{name}_seconds"]
    passes = seconds * bandwidth / (4 * found["elements"])
    print(f"| {name} | {seconds:.3g} | {seconds / bare:.2f} | {passes:.2f} |")
print(f"\n{bandwidth / 1e9:.0f} GB/s in the bare update")
EOF
  python scripts/gpu_fit.py 2>"$out/fit_$way.log" | tee "$out/fit_$way.txt"
done
