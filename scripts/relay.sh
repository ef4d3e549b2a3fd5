#!/usr/bin/env bash
# Tests the contract of Dynamo's KV relay against Dynamo's own relay, and Dynamo's cells and selection services below a
# kvrouter.
# Dynamo is installed into its own venv (kept in ${XDG_CACHE_HOME:-~/.cache}/kvrouter). Needs `make setup`.
# Usage: scripts/relay.sh [ARGUMENTS of go test]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PROG=relay
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

need_dynamo
scripts/build-native.sh
KVROUTER_DYNAMO_PYTHON=$DYNAMO/bin/python KVROUTER_DYNAMO_MODEL=$CACHE/smollm2-135m-instruct go test -count 1 -v -timeout 10m "$@" ./test/real/relay
KVROUTER_PEERS_DYNAMO=$DYNAMO/bin/python KVROUTER_DYNAMO_MODEL=$CACHE/smollm2-135m-instruct exec go test -run '^Test(SelectionServices|DynamoCells)Below' -count 1 -v -timeout 10m ./test/real/peers
