#!/usr/bin/env bash
# Prints the path of helm. The first call builds it from source into the cache, which takes minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PROG=helm
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

HELM_VERSION=4.3.1
helm=$CACHE/helm-$HELM_VERSION/helm

# A binary at that path is complete: it is built beside and then moved.
if ! [ -x "$helm" ]; then
  python=$(find_python 'import fcntl') || die "missing: python3"
  take_lock "$python" helm
fi
if ! [ -x "$helm" ]; then
  command -v go >/dev/null 2>&1 || die "missing: go"
  mkdir -p "$CACHE/log" "${helm%/*}"
  work=$(mktemp -d "$CACHE/helm-build.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  say "building helm $HELM_VERSION (log: $CACHE/log/helm.log)"
  GOBIN=$work GOFLAGS=-trimpath CGO_ENABLED=0 run_logged "$CACHE/log/helm.log" go install -ldflags '-s -w' "helm.sh/helm/v4/cmd/helm@v$HELM_VERSION"
  mv "$work/helm" "$helm"
fi
printf '%s\n' "$helm"
