#!/usr/bin/env bash
# Builds what is given away of the commit that is checked out, into out/dist:
#   kvrouter-linux-ARCH      static binaries, amd64 and, where the cross compiler is installed, arm64
#   kvrouter-image-ARCH.tar  images FROM scratch for docker load and podman load, where buildah works
#   kvrouter-ARCH.cdx.json   what went into them: Go modules, crates, C library (CycloneDX)
#   completions/, kvrouter.1 for shells and man
#   kvrouter.service, compose.yaml
#   SHA256SUMS               of all of them
# The same commit, compilers and C library give the same binaries, whoever builds them and where. KVROUTER_DIST_ARCHS="amd64"
# builds that one only.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PROG=dist
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

[ "$(uname -s)" = Linux ] || die "static binaries are linked on Linux only"
for tool in git go cargo cc sha256sum tar; do
  command -v "$tool" >/dev/null 2>&1 || die "missing: $tool"
done
python=$(find_python 'import sys, tomllib') || die "python3 3.11 or newer is needed"
git rev-parse --verify -q HEAD >/dev/null || die "the version is the commit's: run this in a clone with git"
[ -z "$(git status --porcelain)" ] || say "what is not committed is left out"

case $(uname -m) in
  x86_64) here=amd64 ;;
  aarch64 | arm64) here=arm64 ;;
  *) die "no recipe for $(uname -m)" ;;
esac

out=$PWD/out/dist
work=$(mktemp -d)
trap 'chmod -R u+w "$work" 2>/dev/null || true; rm -rf "$work" || true' EXIT
rm -rf "$out"
mkdir -p "$out"

# Go reads version, commit and date of a clone, not of a work tree of one.
git clone -q --shared . "$work/src"
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
umask 022

# recipe ARCH sets what depends on the architecture; false: it cannot be built here.
recipe() {
  case $1 in
    amd64) triple=x86_64-unknown-linux-gnu cross=x86_64-linux-gnu-gcc ;;
    arm64) triple=aarch64-unknown-linux-gnu cross=aarch64-linux-gnu-gcc ;;
    *) die "KVROUTER_DIST_ARCHS: there is no $1, give amd64, arm64 or both" ;;
  esac
  if [ "$1" = "$here" ]; then
    cross=cc
  elif ! command -v "$cross" >/dev/null 2>&1 || ! command -v "${cross%gcc}g++" >/dev/null 2>&1; then
    say "no $1: $cross or ${cross%gcc}g++ is missing (Debian: apt install gcc-${triple%%-*}-linux-gnu g++-${triple%%-*}-linux-gnu)"
    return 1
  fi
  if ! [ -d "$(rustc --print sysroot)/lib/rustlib/$triple" ]; then
    say "no $1: Rust's library for it is missing (rustup target add $triple)"
    return 1
  fi
}

# build ARCH makes the binary.
build() {
  say "building for linux/$1"
  (
    cd "$work/src"
    scripts/build-native.sh "$triple"
    rm -rf native/lib
    mv "native/target/$triple" native/lib
    # ld's warning that getaddrinfo and getpwuid_r want the shared C library is of Rust's standard library, where
    # nothing calls them: Go's own resolver is built in (netgo, osusergo).
    # Go's build ID depends on the folder that cgo links from.
    CC=$cross GOOS=linux GOARCH=$1 CGO_ENABLED=1 go build -buildvcs=true -trimpath -tags netgo,osusergo \
      -ldflags '-s -w -buildid= -linkmode external -extldflags "-static -Wl,--build-id=none"' -o "$out/kvrouter-linux-$1" . 2> >(
        grep -v -e 'in statically linked applications requires at runtime' -e ': in function `' -e '^# kvrouter$' -e '/ld: .*\.o): ' >&2 || true)
    rm -rf native/lib
  )
}

b=(buildah --root "$work/storage" --runroot "$work/run" --storage-driver vfs)

# images tells whether images can be built here, and if not why.
images() {
  if ! command -v buildah >/dev/null 2>&1; then
    say "no images: buildah is missing (Debian: apt install buildah)"
  elif ! [ -f "$certificates" ]; then
    say "no images: $certificates is missing (Debian: apt install ca-certificates)"
  elif ! { "${b[@]}" from scratch && "${b[@]}" rm -a; } >/dev/null 2>"$work/why"; then
    say "no images: buildah cannot work here, as root it may: $(tail -n 1 "$work/why")"
  else
    return 0
  fi
  return 1
}

# image ARCH puts the binary into an image of its own: nothing else is in it but the authorities for https, and a
# user who is not root.
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
  # In the image there is no engine to start: workers are attached, or simulated with --engine mocker.
  "${b[@]}" config --arch "$1" --os linux --user 65532:65532 --entrypoint '["/kvrouter"]' --env KVROUTER_ENGINE=none \
    --port 8000 --port 7000 --stop-signal SIGTERM \
    --label org.opencontainers.image.title=kvrouter --label "org.opencontainers.image.version=$version" \
    --label "org.opencontainers.image.revision=$(git rev-parse HEAD)" "$container"
  "${b[@]}" commit -q --format oci --timestamp "$SOURCE_DATE_EPOCH" "$container" "$tag" >/dev/null
  # The form that both docker and podman load, under the same name.
  "${b[@]}" push -q "$tag" "docker-archive:$out/$name.tar"
  "${b[@]}" rm -a >/dev/null
  say "$name.tar: $(($(stat -c %s "$out/$name.tar") / 1000000)) MB"
}

mkdir -p "$work/data"
echo 'What a router keeps: a volume for --index-snapshot and --thompson-state.' >"$work/data/README"
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
