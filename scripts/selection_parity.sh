#!/usr/bin/env bash
# Sends the same operations to kvrouter's router port and to Dynamo's standalone selection service, and compares every
# response. Dynamo is installed into its own venv (kept in ${XDG_CACHE_HOME:-~/.cache}/kvrouter).
# Usage: scripts/selection_parity.sh [ARGUMENTS of go test]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PROG=parity
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

need_dynamo
scripts/build-native.sh
KVROUTER_DYNAMO_PYTHON=$DYNAMO/bin/python exec go test -run '^TestSelectionParity|^TestDynamo' -count 1 -v -timeout 10m "$@" ./test
