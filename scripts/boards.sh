#!/usr/bin/env bash
# Tests deploy/ with Prometheus: checks and tests the alerts with promtool, then evaluates
# every expression of the dashboard and the alerts in a Prometheus that scrapes simulated workers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if ! command -v promtool >/dev/null || ! command -v prometheus >/dev/null; then
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "missing: promtool and prometheus: install your system's package prometheus (Debian: apt-get install prometheus)" >&2
    exit 1
  fi
  echo "installing prometheus (promtool)"
  apt-get update -qq
  # Only the programs are needed: RUNLEVEL=1 keeps the package from starting a server.
  RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends prometheus >/dev/null
fi
scripts/build-native.sh
promtool check rules deploy/prometheus/alerts.yaml
promtool test rules deploy/prometheus/alerts_test.yaml
KVROUTER_PROMETHEUS=$(command -v prometheus) go test -count 1 -run '^(TestBoard|TestEveryAlert|TestWrongExpressions)' ./test/deploy ./test/real/prometheus
