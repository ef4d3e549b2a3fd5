#!/usr/bin/env bash
# Runs kvrouter over two real vLLM CPU workers that hand prompts over by MooncakeConnector, over TCP
# (TestMooncakeWorkersOnRealVLLM). `make setup` comes first. Mooncake's transfer engine is installed once, into a folder
# of its own under ${XDG_CACHE_HOME:-~/.cache}/kvrouter; testdata/mooncake has what vLLM needs beside it.
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

has_gpu && die "the two workers are for the CPU, this machine has a GPU: attach workers of its own with kind=mooncake"
[ -x "$python" ] || die "there is no vLLM in $VLLM_CPU: run make setup"

# The engine links the library of RDMA cards, libibverbs, whatever it is to send by; over TCP it only asks it which cards
# there are. Where the machine has none, one that knows of no card takes its place.
if "$python" -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null; then
  verbs="the machine's libibverbs"
else
  verbs="a libibverbs without cards"
  missing=()
  for tool in cc nm; do command -v "$tool" >/dev/null 2>&1 || missing+=("$tool"); done
  [ ${#missing[@]} -eq 0 ] || die "missing: ${missing[*]}, to make $verbs: Debian/Ubuntu: sudo apt install build-essential (or libibverbs1, the real one)"
fi

# make_verbs writes that library to where the engine looks first, with the functions that it wants, each under the version
# that it wants it in. Whatever else than the list of cards is used ends the process: nothing should.
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
  # Without its dependencies: those of the connector have come with vLLM, whose venv stays as it is.
  uv_install "$VLLM_CPU" "$LOG" --no-deps --target "$MOONCAKE" "${want%% *}"
  [ "$verbs" = "the machine's libibverbs" ] || make_verbs
  absent=$(ldd "$MOONCAKE/mooncake/engine.so" | awk '/not found/ { print $1 }' | sort -u | xargs)
  [ -z "$absent" ] || die "missing: $absent, which Mooncake's engine links: Debian/Ubuntu: sudo apt install libnuma1 libcurl4"
  PYTHONPATH="$MOONCAKE" run_logged "$LOG" "$python" -c 'from mooncake.engine import TransferEngine'
  stamp "$MOONCAKE" "$want"
fi
exec 9>&- # others may go on

KVROUTER_MOONCAKE=$MOONCAKE exec go test -run '^TestMooncakeWorkersOnRealVLLM$' -count 1 -v -timeout 40m "$@" ./test/real/vllm
