#!/usr/bin/env bash
# Prints the path of helm, built from source into the cache: the first time takes minutes, later ones nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PROG=helm
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

HELM_VERSION=4.3.1
helm=$CACHE/helm-$HELM_VERSION/helm

# What is there is whole: it is built beside and then moved.
if ! [ -x "$helm" ]; then
  python=$(find_python 'import fcntl') || die "python3 is needed"
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
