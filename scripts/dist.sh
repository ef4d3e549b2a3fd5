#!/usr/bin/env bash
# Builds the release artifacts of the checked-out commit into out/dist:
#   kvrouter-linux-ARCH      static binaries: amd64, and arm64 if the cross compiler is installed
#   kvrouter-image-ARCH.tar  images FROM scratch for docker load and podman load, if buildah works
#   kvrouter-ARCH.cdx.json   bill of materials (CycloneDX): Go modules, crates, C library
#   completions/, kvrouter.1 shell completions and man page
#   kvrouter.service, compose.yaml
#   SHA256SUMS               checksums of all files
# Builds are reproducible: the same commit, compilers and C library give the same binaries on any machine and in any
# folder. KVROUTER_DIST_ARCHS="amd64" builds for one architecture.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PROG=dist
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

[ "$(uname -s)" = Linux ] || die "static binaries can be linked on Linux only"
for tool in git go cargo cc sha256sum tar; do
  command -v "$tool" >/dev/null 2>&1 || die "missing: $tool"
done
python=$(find_python 'import sys, tomllib') || die "missing: python3 3.11 or newer"
git rev-parse --verify -q HEAD >/dev/null || die "not a git clone: the version is read from the commit"
[ -z "$(git status --porcelain)" ] || say "uncommitted changes are not included"

case $(uname -m) in
  x86_64) here=amd64 ;;
  aarch64 | arm64) here=arm64 ;;
  *) die "unsupported architecture: $(uname -m)" ;;
esac

out=$PWD/out/dist
work=$(mktemp -d)
trap 'chmod -R u+w "$work" 2>/dev/null || true; rm -rf "$work" || true' EXIT
rm -rf "$out"
mkdir -p "$out"

# Go reads the version, commit and date of a clone, but not of a linked work tree.
git clone -q --shared . "$work/src"
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
umask 022

# recipe ARCH sets the variables of an architecture; it returns false if this machine cannot build for it.
recipe() {
  case $1 in
    amd64) triple=x86_64-unknown-linux-gnu cross=x86_64-linux-gnu-gcc ;;
    arm64) triple=aarch64-unknown-linux-gnu cross=aarch64-linux-gnu-gcc ;;
    *) die "KVROUTER_DIST_ARCHS: unknown architecture $1: must be amd64, arm64 or both" ;;
  esac
  if [ "$1" = "$here" ]; then
    cross=cc
  elif ! command -v "$cross" >/dev/null 2>&1 || ! command -v "${cross%gcc}g++" >/dev/null 2>&1; then
    say "skipping $1: $cross or ${cross%gcc}g++ is missing (Debian: apt install gcc-${triple%%-*}-linux-gnu g++-${triple%%-*}-linux-gnu)"
    return 1
  fi
  if ! [ -d "$(rustc --print sysroot)/lib/rustlib/$triple" ]; then
    say "skipping $1: Rust's standard library for it is missing (rustup target add $triple)"
    return 1
  fi
}

# build ARCH builds the binary.
build() {
  say "building for linux/$1"
  (
    cd "$work/src"
    scripts/build-native.sh "$triple"
    rm -rf native/lib
    mv "native/target/$triple" native/lib
    # ld warns that getaddrinfo and getpwuid_r need the shared C library. Rust's standard library references them, but
    # nothing calls them: Go's own resolver is built in (netgo, osusergo).
    # The build ID is empty because it depends on the folder that cgo links from.
    CC=$cross GOOS=linux GOARCH=$1 CGO_ENABLED=1 go build -buildvcs=true -trimpath -tags netgo,osusergo,nomsgpack \
      -ldflags '-s -w -buildid= -linkmode external -extldflags "-static -Wl,--build-id=none"' -o "$out/kvrouter-linux-$1" . 2> >(
        grep -v -e 'in statically linked applications requires at runtime' -e ': in function `' -e '^# kvrouter$' -e '/ld: .*\.o): ' >&2 || true)
    rm -rf native/lib
  )
}

b=(buildah --root "$work/storage" --runroot "$work/run" --storage-driver vfs)

# images returns true if images can be built here, and prints the reason if not.
images() {
  if ! command -v buildah >/dev/null 2>&1; then
    say "skipping images: buildah is missing (Debian: apt install buildah)"
  elif ! [ -f "$certificates" ]; then
    say "skipping images: $certificates is missing (Debian: apt install ca-certificates)"
  elif ! { "${b[@]}" from scratch && "${b[@]}" rm -a; } >/dev/null 2>"$work/why"; then
    say "skipping images: buildah does not work here, try as root: $(tail -n 1 "$work/why")"
  else
    return 0
  fi
  return 1
}

# image ARCH builds an image that contains the binary, the CA certificates and a non-root user, and nothing else.
image() {
  local root=$work/root container name=kvrouter-image-$1 tag=docker.io/library/kvrouter:$version
  rm -rf "$root"
  mkdir -p "$root/etc/ssl/certs"
  install -m 755 "$out/kvrouter-linux-$1" "$root/kvrouter"
  install -m 644 "$certificates" "$root/etc/ssl/certs/ca-certificates.crt"
  echo 'kvrouter:x:65532:65532::/:/kvrouter' >"$root/etc/passwd"
  container=$("${b[@]}" from --arch "$1" scratch)
  "${b[@]}" copy -q "$container" "$root" / >/dev/null
  "${b[@]}" copy -q --chown 65532:65532 "$container" "$work/data" /var/lib/kvrouter >/dev/null
  # The image contains no engine to start: workers are attached, or simulated with --engine mocker.
  "${b[@]}" config --arch "$1" --os linux --user 65532:65532 --entrypoint '["/kvrouter"]' --env KVROUTER_ENGINE=none \
    --port 8000 --port 7000 --stop-signal SIGTERM \
    --label org.opencontainers.image.title=kvrouter --label "org.opencontainers.image.version=$version" \
    --label "org.opencontainers.image.revision=$(git rev-parse HEAD)" "$container"
  "${b[@]}" commit -q --format oci --timestamp "$SOURCE_DATE_EPOCH" "$container" "$tag" >/dev/null
  # docker and podman both load this format, under the same name.
  "${b[@]}" push -q "$tag" "docker-archive:$out/$name.tar"
  "${b[@]}" rm -a >/dev/null
  say "$name.tar: $(($(stat -c %s "$out/$name.tar") / 1000000)) MB"
}

mkdir -p "$work/data"
echo 'State of the router: a volume for --index-snapshot and --thompson-state.' >"$work/data/README"
certificates=/etc/ssl/certs/ca-certificates.crt
version=""
pack=no
if images; then pack=yes; fi
for arch in ${KVROUTER_DIST_ARCHS:-amd64 arm64}; do
  recipe "$arch" || continue
  build "$arch"
  binary=$out/kvrouter-linux-$arch
  version=$(go version -m "$binary" | awk '$1 == "mod" { print $3 }')
  "$python" scripts/sbom.py --binary "$binary" --native "$work/src/native" --target "$triple" --commit "$(git rev-parse HEAD)" >"$out/kvrouter-$arch.cdx.json"
  if [ "$pack" = yes ]; then image "$arch"; fi
done
[ -n "$version" ] || die "nothing was built"
install -m 644 "$work/src/deploy/systemd/kvrouter.service" "$work/src/deploy/compose.yaml" "$out"
if [ -f "$out/kvrouter-linux-$here" ]; then
  mkdir "$out/completions"
  "$out/kvrouter-linux-$here" completion bash >"$out/completions/kvrouter.bash"
  "$out/kvrouter-linux-$here" completion zsh >"$out/completions/_kvrouter"
  "$out/kvrouter-linux-$here" completion fish >"$out/completions/kvrouter.fish"
  "$out/kvrouter-linux-$here" man >"$out/kvrouter.1"
fi
(cd "$out" && find . -type f ! -name SHA256SUMS -printf '%P\n' | LC_ALL=C sort | xargs sha256sum >SHA256SUMS)
say "kvrouter $version is in out/dist:"
(cd "$out" && find . -type f -printf '%s %P\n' | LC_ALL=C sort -k 2 | awk '{ printf "  %7.1f MB  %s\n", $1 / 1e6, $2 }') >&2
