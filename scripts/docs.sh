#!/usr/bin/env bash
# Build the pages of docs/ into site/, strictly: a dead link or a page that nothing
# names is an error. TensorFlow is neither needed nor imported.
#
#   scripts/docs.sh        build
#   scripts/docs.sh serve  build, show at http://127.0.0.1:8000, follow changes
#
# Ends with status 3 where MkDocs cannot be installed.
# Uses .venv-docs, which is made where it is missing; or the mkdocs that MKDOCS names.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -z "${MKDOCS:-}" ]; then
  MKDOCS=$PWD/.venv-docs/bin/mkdocs
  if ! cmp -s setup.cfg .venv-docs/.installed; then
    "${PYTHON:-python3}" -m venv --clear .venv-docs
    # The extra alone: the pages need the sources of the package, not the package.
    .venv-docs/bin/python - <<'END' >.venv-docs/requirements.txt
import configparser

settings = configparser.ConfigParser()
settings.read("setup.cfg")
print(settings["options.extras_require"]["docs"])
END
    .venv-docs/bin/python -m pip install --quiet --disable-pip-version-check \
      -r .venv-docs/requirements.txt || exit 3
    cp setup.cfg .venv-docs/.installed
  fi
fi
# The theme's notice about another generator of sites is not about these pages.
export NO_MKDOCS_2_WARNING=1
case ${1:-build} in
  build) exec "$MKDOCS" build --strict --clean ;;
  serve) exec "$MKDOCS" serve --strict "${@:2}" ;;
  *) echo "scripts/docs.sh [serve]" >&2 && exit 2 ;;
esac
