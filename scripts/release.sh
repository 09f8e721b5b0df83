#!/usr/bin/env bash
# Build the source distribution and the wheel into dist/, and check them: what they
# hold, how the index would show them, and that the wheel installs. Nothing is published.
#
#   scripts/release.sh
#
# Uses an environment of its own in a temporary folder; PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1
version=$(sed -nE 's/^__version__ = "(.*)"$/\1/p' tf_dgc/version.py)
for file in CITATION.cff CHANGELOG.md; do
  grep -qE "^(version: |## \[)$version" "$file" || {
    echo "$file does not name version $version" >&2
    exit 1
  }
done

"${PYTHON:-python3}" -m venv "$work/tools"
"$work/tools/bin/python" -m pip install --quiet build twine check-wheel-contents
rm -rf dist
# From a copy: building leaves files beside the sources.
git archive --format tar HEAD | tar -x -C "$work" --one-top-level=checkout
"$work/tools/bin/python" -m build --outdir dist "$work/checkout"
"$work/tools/bin/twine" check --strict dist/*
"$work/tools/bin/check-wheel-contents" dist/*.whl

# Without TensorFlow, which this does not need.
"${PYTHON:-python3}" -m venv "$work/installed"
"$work/installed/bin/python" -m pip install --quiet --no-deps dist/*.whl
found=$(cd "$work" && installed/bin/python -c 'import tf_dgc; print(tf_dgc.__version__)')
[ "$found" = "$version" ] || { echo "The wheel is of $found" >&2 && exit 1; }
(cd "$work" && installed/bin/tf-dgc-run --help >/dev/null)
echo "dist/ has tf_dgc $version:"
ls -l dist
