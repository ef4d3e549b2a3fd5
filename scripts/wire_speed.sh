#!/bin/sh
# Measures the CPU that KV events cost on their way from the wire into the
# index, beside Dynamo's standalone indexer fed with the same bytes.
# Usage: scripts/wire_speed.sh [--runs N] [--batches N]
set -eu
cd "$(dirname "$0")/.."
cache="${XDG_CACHE_HOME:-$HOME/.cache}/kvrouter"
venv="$cache/peers-dynamo-1.6.1"
mkdir -p "$cache"
if ! "$venv/bin/python" -c 'import dynamo.indexer, msgspec, zmq' 2>/dev/null; then
	"${PYTHON:-python3}" -m venv "$venv"
	"$venv/bin/pip" install --quiet --disable-pip-version-check ai-dynamo-runtime==1.6.1 pyzmq==27.3.0 msgspec
fi
mkdir -p out
go test -c -o out/wire_speed.test .
exec "$venv/bin/python" scripts/wire_speed.py --ours out/wire_speed.test "$@"
