# shellcheck shell=bash
# Make .venv, install the package into it and build Horovod. For bash, to be sourced:
#
#   . scripts/setup_env.sh
#
# Goes to the repository root, puts .venv/bin first on PATH, and sets
# horovod_missing: empty where Horovod works, else the reason why it does not.
# What was done before is not done again; a run that was cut short goes on where
# it stopped. Honours
#   PYTHON                    the interpreter to make .venv with (3.11 or newer)
#   TF_DGC_NO_HOROVOD=1       do without Horovod
#   TF_DGC_REQUIRE_HOROVOD=1  fail where Horovod cannot be had
#   TF_DGC_VENV               another folder than .venv
#   TF_DGC_WITH               versions to install, as "tensorflow==2.18.* keras==3.10.*"

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$PWD/${TF_DGC_VENV:-.venv}
read -ra with <<<"${TF_DGC_WITH:-}"
log=$venv.log # beside .venv, which a restart may empty
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2} # TensorFlow: errors only
export PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONHOME PYTHONPATH

heartbeat=
stop_heartbeat() {
  [ -z "$heartbeat" ] || kill "$heartbeat" 2>/dev/null || true
  heartbeat=
}
trap stop_heartbeat EXIT
trap 'exit 130' INT # Ctrl-C is no failed step
trap 'exit 143' TERM

# Run one step: its title, the seconds as they pass, its output in the log. On a
# terminal all that is one line, which counts.
step() { # TITLE COMMAND...
  local title=$1 start=$SECONDS every=20 status=0 end='' before
  shift
  before=$(wc -l <"$log")
  [ -t 1 ] && every=1 end=$'\n' || echo "$title"
  state() {
    if [ -t 1 ]; then
      printf '\r\033[K%s  %s' "$title" "$1"
    else
      printf '      %s\n' "$1"
    fi
  }
  (
    while sleep "$every" >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
      state "$((SECONDS - start)) s ..."
    done
  ) </dev/null &
  heartbeat=$!
  "$@" >>"$log" 2>&1 </dev/null || status=$?
  stop_heartbeat
  if [ "$status" -eq 0 ]; then
    state "$((SECONDS - start)) s, done$end"
  else
    state "$((SECONDS - start)) s, failed; the end of $log:$end"
    tail -n +$((before + 1)) "$log" | tail -n 25 | sed 's/^/      | /'
  fi
  return "$status"
}

new_enough() { # INTERPRETER
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3 python3.12 python3.13}; do
    if new_enough "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  echo "tf_dgc needs Python 3.11 or newer, and ${PYTHON:-python3} is" \
    "$("${PYTHON:-python3}" -V 2>&1 || true). Set PYTHON to a newer one." >&2
  return 1
}

make_venv() { # INTERPRETER
  "$1" -m venv --clear "$venv" || {
    echo "Debian, Ubuntu: apt-get install python3-venv"
    return 1
  }
}

install_package() {
  "$venv/bin/python" -m pip install --upgrade pip &&
    "$venv/bin/python" -m pip install --editable '.[test,examples]' "${with[@]}"
}

# Horovod that loads may still be unable to connect two workers on this machine.
install_horovod() {
  scripts/install_horovod.sh "$venv/bin/python" || return
  timeout --kill-after 10 120 horovodrun -np 2 "$venv/bin/python" -c \
    'import horovod.tensorflow as hvd; hvd.init(); print("workers:", hvd.size())'
}

# What is installed follows from this; a mark holds it for what is done.
key() {
  {
    "$venv/bin/python" -V
    echo "$venv"/lib/python3*/site-packages/tensorflow*.dist-info
    echo "${with[@]}"
    cat setup.cfg scripts/install_horovod.sh
  } 2>&1 | sha256sum
}
package_mark=$venv/.package_installed
horovod_mark=$venv/.horovod_installed

touch "$log"
if [ "$(cat "$package_mark" 2>/dev/null)" != "$(key)" ]; then
  : >"$log"
  if ! new_enough "$venv/bin/python" || ! "$venv/bin/python" -m pip -V >>"$log" 2>&1
  then
    python=$(find_python)
    step "[1/4] Virtual environment ${venv##*/}" make_venv "$python"
  fi
  step "[2/4] Install tf_dgc, TensorFlow and what the tests need" install_package
  key >"$package_mark"
fi

export PATH=$venv/bin:$PATH
horovod_missing=
if [ "${TF_DGC_NO_HOROVOD:-0}" = 1 ]; then
  horovod_missing="TF_DGC_NO_HOROVOD=1 is set"
elif [ "$(head -n 1 "$horovod_mark" 2>/dev/null)" = "$(key)" ]; then
  horovod_missing=$(tail -n +2 "$horovod_mark")
else
  status=0
  step "[3/4] Horovod, built from source: some minutes" install_horovod || status=$?
  case $status in
    0) ;;
    3) horovod_missing="no C++ compiler or no make (apt-get install build-essential)" ;;
    *) horovod_missing="its build or its first run failed, see $log (to try again:"
       horovod_missing+=" rm $horovod_mark)" ;;
  esac
  # Missing tools are looked for again next time, a failed build is not repeated.
  [ "$status" = 3 ] || { key && echo -n "$horovod_missing"; } >"$horovod_mark"
fi
if [ -n "$horovod_missing" ]; then
  echo "No Horovod: $horovod_missing."
  if [ "${TF_DGC_REQUIRE_HOROVOD:-0}" = 1 ]; then
    echo "TF_DGC_REQUIRE_HOROVOD=1 is set: stopping here." >&2
    exit 1
  fi
fi
