#!/bin/sh
# Measures the proxy path beside vllm-router: CPU a request, added time to first
# token, resident memory, over four engines that answer at once.
# Usage: scripts/peers_proxy.sh [--runs N] [--requests N]
set -eu
cd "$(dirname "$0")/.."
cache="${XDG_CACHE_HOME:-$HOME/.cache}/kvrouter"
venv="$cache/peers-vllm-router-0.1.17"
mkdir -p "$cache"
if ! "$venv/bin/python" -c 'import vllm_router' 2>/dev/null; then
	"${PYTHON:-python3}" -m venv "$venv"
	"$venv/bin/pip" install --quiet --disable-pip-version-check vllm-router==0.1.17
fi
mkdir -p out
go test -c -o out/peers.test .
go build -o out/kvrouter .
exec "${PYTHON:-python3}" scripts/peers_proxy.py --venv "$venv" --model "$cache/smollm2-135m-instruct" "$@"
