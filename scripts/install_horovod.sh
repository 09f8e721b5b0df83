#!/usr/bin/env bash
# Build Horovod from source against the TensorFlow that is installed.
#
#   scripts/install_horovod.sh [PYTHON]      (default: python)
#
# Leaves a Horovod alone that already fits. Takes about three minutes on two
# cores; needs a C++17 compiler and make. Set HOROVOD_GPU_OPERATIONS=NCCL (and
# HOROVOD_NCCL_HOME) for GPUs, which needs the CUDA toolkit and NCCL's headers; one
# without NCCL is then built again. HOROVOD_CPU_OPERATIONS=MPI likewise builds one for
# mpirun, which needs MPI's headers. Other Horovod build variables pass through too.
# Exit status: 0 Horovod is there, 3 build tools are missing, else it failed.
set -euo pipefail

python=$(realpath -s "$(command -v "${1:-python}")")
version=0.28.1

found='import importlib.util as u, sys; sys.exit(not u.find_spec("tensorflow"))'
if ! "$python" -c "$found"; then
  echo "install_horovod: TensorFlow is not installed for $python" >&2
  exit 1
fi

# Horovod's own version does not say what it was built against; metadata.json does.
fits() {
  TF_CPP_MIN_LOG_LEVEL=2 "$python" - <<'EOF'
import importlib.util, json, os, pathlib, sys

spec = importlib.util.find_spec("horovod")
if spec is None:
    sys.exit(1)
import tensorflow as tf

metadata = pathlib.Path(spec.origin).with_name("metadata.json")
if json.loads(metadata.read_text())["tensorflow"] != tf.__version__:
    sys.exit(1)
import horovod.tensorflow as hvd

if os.environ.get("HOROVOD_CPU_OPERATIONS") == "MPI" and not hvd.mpi_built():
    sys.exit(1)
wants_nccl = os.environ.get("HOROVOD_GPU_OPERATIONS") == "NCCL"
sys.exit(wants_nccl and not hvd.nccl_built())
EOF
}
if fits 2>/dev/null; then
  echo "install_horovod: a Horovod that fits this TensorFlow is already there"
  exit 0
fi

for tool in g++ make; do
  if ! command -v "$tool" >/dev/null; then
    echo "install_horovod: $tool not found; install a C++ compiler and make" \
      "(Debian, Ubuntu: apt-get install build-essential)" >&2
    exit 3
  fi
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m pip install -q "setuptools<81" wheel packaging
if ! cmake --version 2>/dev/null | grep -q 'version 3\.'; then
  "$python" -m pip install -q "cmake>=3.20,<4"   # gloo's CMake files predate 4
  bin=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
  export PATH=$bin:$PATH
fi
cd "$work"
"$python" -m pip download -q --no-cache-dir --no-deps --no-build-isolation \
  --no-binary horovod "horovod==$version"
tar xf "horovod-$version.tar.gz"
cd "horovod-$version"
# The optional XLA operators include headers that TensorFlow's wheel lacks.
: > horovod/tensorflow/xla_mpi_ops.cc

export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
export HOROVOD_WITH_GLOO=1 HOROVOD_CPU_OPERATIONS=${HOROVOD_CPU_OPERATIONS:-GLOO}
[ "$HOROVOD_CPU_OPERATIONS" = MPI ] || export HOROVOD_WITHOUT_MPI=1
export MAKEFLAGS=${MAKEFLAGS:--j$(nproc)}
# pip's wheel cache would hand out a wheel built against another TensorFlow.
if ! "$python" -m pip install --no-build-isolation --no-cache-dir \
  --force-reinstall --no-deps . >build.log 2>&1; then
  tail -n 40 build.log >&2
  echo "install_horovod: the build failed; the end of its log is above" >&2
  exit 1
fi
"$python" -m pip install -q cloudpickle psutil pyyaml packaging
cd /
if ! fits; then
  echo "install_horovod: built, but it does not load; the reason is above" >&2
  exit 1
fi
echo "install_horovod: built Horovod $version"
