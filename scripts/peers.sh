#!/usr/bin/env bash
# Compares kvrouter with other projects, each installed into its own venv
# (kept in ${XDG_CACHE_HOME:-~/.cache}/kvrouter):
#   wire        indexing KV events from the wire: dynamo.indexer
#   simulator   trace simulation: Dynamo's simulator
#   proxy       proxying requests: vllm-router
#   predictions predicted cache hits for models with several KV-cache groups and workers with lower tiers: Dynamo's selection service, vllm-router
#   fleet       cache hits of simulated workers behind each router as its README starts it: vllm-router, SMG (only if it is named)
# Usage: scripts/peers.sh [PART [OPTIONS of scripts/peers_PART.py or scripts/bench_fleet.py]]; all other parts if none is named.
# Tables go to stdout and out/peers_PART.txt, progress and the results of the checks to stderr. Needs `make setup`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PROG=peers
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

python=$(find_python "$PEERS_PYTHON_CHECK") || die "missing: python3 3.10 to 3.14 with venv"
[ "$(uname -s)" = Linux ] || die "needs Linux: CPU and memory are read from /proc"
take_lock "$python" peers
mkdir -p "$CACHE/log" out
: >out/peers_checks.txt

vllm_router="$CACHE/peers-vllm-router-0.1.17" smg="$CACHE/peers-smg-1.13.0"

# prepare PART installs and builds what a part needs.
prepare() {
  case $1 in
    wire) install_dynamo && go test -c -o out/wire.test ./internal/cache/events ;;
    simulator) install_dynamo ;;
    proxy) install_peer "$vllm_router" vllm-router==0.1.17 && go test -c -o out/peers.test ./test/real/peers ;;
    predictions) prepare simulator && prepare proxy ;;
    fleet) install_peer "$vllm_router" vllm-router==0.1.17 && install_peer "$smg" smg==1.13.0 ;;
    *) die "unknown part $1: must be wire, simulator, proxy, predictions or fleet" ;;
  esac
}

# measure PART OPTIONS... runs one part.
measure() {
  local part=$1 runs=$python script="scripts/peers_$1.py"
  local -a needs
  shift
  case $part in
    wire) runs="$DYNAMO/bin/python" needs=(--ours out/wire.test) ;;
    simulator) runs="$DYNAMO/bin/python" needs=(--kvrouter out/kvrouter) ;;
    proxy) needs=(--kvrouter out/kvrouter --test-binary out/peers.test --vllm-router "$vllm_router/bin/vllm-router" --model "$CACHE/smollm2-135m-instruct") ;;
    predictions)
      KVROUTER_PEERS_DYNAMO="$DYNAMO/bin/python" KVROUTER_PEERS_VLLM_ROUTER="$vllm_router/bin/vllm-router" \
        out/peers.test -test.run '^TestPeers(Predictions|Tiers)$' -test.v "$@" 9>&- | tee "out/peers_$part.txt"
      return
      ;;
    fleet) script=scripts/bench_fleet.py needs=(--kvrouter out/kvrouter --vllm-router "$vllm_router/bin/vllm-router" --smg "$smg/bin/smg") ;;
  esac
  PYTHONDONTWRITEBYTECODE=1 "$runs" "$script" "${needs[@]}" "$@" 9>&- | tee "out/peers_$part.txt"
}

parts=(wire simulator proxy predictions)
if [ $# -gt 0 ]; then
  parts=("$1")
  shift
fi
say "building"
go build -o out/kvrouter .
for part in "${parts[@]}"; do prepare "$part"; done
failed=()
for part in "${parts[@]}"; do
  say "$part"
  measure "$part" "$@" || failed+=("$part")
done
say "checks after $SECONDS s:"
cat out/peers_checks.txt
[ ${#failed[@]} -eq 0 ] || die "failed: ${failed[*]}"
