#!/usr/bin/env bash
# Sends the same operations to kvrouter's router port and to Dynamo's standalone selection service, and compares every
# response. Dynamo is installed into its own venv (kept in ${XDG_CACHE_HOME:-~/.cache}/kvrouter).
# Usage: scripts/selection_parity.sh [ARGUMENTS of go test]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PROG=parity
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

[ "$(uname -s)" = Linux ] || { say "skipped: Dynamo's package supports Linux only"; exit 0; }
python=$(find_python "$PEERS_PYTHON_CHECK") || die "missing: python3 3.10 to 3.14 with venv"
take_lock "$python" peers
mkdir -p "$CACHE/log"
install_dynamo
exec 9>&- # release the lock before the tests
scripts/build-native.sh
KVROUTER_DYNAMO_PYTHON=$DYNAMO/bin/python exec go test -run '^TestSelectionParity|^TestDynamo' -count 1 -v -timeout 10m "$@" ./test
