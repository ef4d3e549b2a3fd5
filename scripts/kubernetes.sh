#!/usr/bin/env bash
# Builds kube-apiserver and kube-controller-manager from the Go module proxy, once, and prints their folder.
# Installs Debian's etcd-server if etcd is missing. Run by `make test-kubernetes`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PROG=kubernetes
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

VERSION=1.36.3
folder=$CACHE/kubernetes-$VERSION

if ! command -v etcd >/dev/null; then
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    die "missing: etcd: install your system's package (Debian: apt-get install etcd-server)"
  fi
  say "installing etcd-server"
  apt-get update -qq >&2
  # Only the program is needed: RUNLEVEL=1 keeps the package from starting a server.
  RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends etcd-server >/dev/null
fi

if ! [ -d "$folder" ]; then
  command -v go >/dev/null || die "missing: go: install it from https://go.dev/dl"
  python=$(find_python 'import fcntl') || die "missing: python3"
  take_lock "$python" kubernetes
fi
if ! [ -d "$folder" ]; then # checked again: another process may have built it while this one waited
  say "building kube-apiserver and kube-controller-manager $VERSION: about 9 minutes on one core, the first time only (log: $CACHE/log/kubernetes.log)"
  mkdir -p "$CACHE/log"
  work=$(mktemp -d "$CACHE/kubernetes.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  export GOWORK=off GOFLAGS=-mod=mod CGO_ENABLED=0
  (
    cd "$work"
    go mod init kvrouter.test/kubernetes 2>/dev/null
    # The staging modules of the Kubernetes repository are published separately, as v0.
    staged=$(sed -n 's|^\t*\(k8s.io/[a-z-]*\) => ./staging/.*|-replace=\1=\1@v0.'"${VERSION#1.}"'|p' "$(go mod download -json "k8s.io/kubernetes@v$VERSION" | sed -n 's/^.*"GoMod": "\(.*\)".*$/\1/p')")
    [ -n "$staged" ] || die "k8s.io/kubernetes $VERSION: its go.mod names no staged modules"
    # shellcheck disable=SC2086
    go mod edit -require="k8s.io/kubernetes@v$VERSION" $staged
    mkdir out
    run_logged "$CACHE/log/kubernetes.log" go build -trimpath -ldflags='-s -w' -o out/ k8s.io/kubernetes/cmd/kube-apiserver k8s.io/kubernetes/cmd/kube-controller-manager
  )
  mv "$work/out" "$folder"
fi
printf '%s\n' "$folder"
