#!/usr/bin/env bash
# Holds deploy/ against Prometheus: checks and tests the alerts by promtool, then asks
# a Prometheus that scrapes simulated workers every expression of board and alerts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if ! command -v promtool >/dev/null || ! command -v prometheus >/dev/null; then
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "promtool and prometheus are missing: install your system's package prometheus (Debian: apt-get install prometheus)" >&2
    exit 1
  fi
  echo "installing prometheus (promtool)"
  apt-get update -qq
  # The package would start a server of its own: only its programs are wanted.
  RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends prometheus >/dev/null
fi
scripts/build-native.sh
promtool check rules deploy/prometheus/alerts.yaml
promtool test rules deploy/prometheus/alerts_test.yaml
KVROUTER_PROMETHEUS=$(command -v prometheus) go test -count 1 -run '^(TestBoard|TestEveryAlert|TestWrongExpressions)' ./test/deploy ./test/real/prometheus
