#!/usr/bin/env bash
# Builds the static library of native/ into native/lib, where cgo looks for it.
# Libraries are cached by the hash of their sources, so a second call only copies.
# The header beside the library is a marker: without it the C compiler stops and
# names `make setup`, before the linker fails to find the library.
#
# With a Rust target as its argument (x86_64-unknown-linux-gnu) it builds for a
# release: into native/target/TARGET, without this machine's paths in the library.
set -euo pipefail
cd "$(dirname "$0")/.."

for tool in cargo rustc; do
    if ! command -v "$tool" >/dev/null; then
        echo "build-native: missing: $tool: install Rust from https://rustup.rs" >&2
        exit 1
    fi
done

# fastokens needs Rust 1.88.
if [ "$(printf '%s\n' 1.88 "$(rustc --version | cut -d' ' -f2)" | sort -V | head -n 1)" != 1.88 ]; then
    echo "build-native: $(rustc --version) is too old: install Rust 1.88 or newer from https://rustup.rs" >&2
    exit 1
fi

# PCRE2 is linked into the library, because cgo does not link the system's.
export PCRE2_SYS_STATIC=1

cache=${XDG_CACHE_HOME:-$HOME/.cache}/kvrouter/native
lib=native/lib
triple=${1:-}
builds=$cache/target
built=$builds/release
if [ -n "$triple" ]; then
    lib=native/target/$triple
    builds=$cache/target-dist
    built=$builds/$triple/release
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
    crates=${CARGO_HOME:-$HOME/.cargo}
    # A static program cannot look up getrandom at run time: without this setting it would need /dev/urandom.
    export RUSTFLAGS="--cfg getrandom_backend=\"linux_getrandom\" --remap-path-prefix=$PWD/native=/native --remap-path-prefix=$crates=/cargo --remap-path-prefix=$builds=/target"
    export CFLAGS="-ffile-prefix-map=$crates=/cargo -ffile-prefix-map=$builds=/target"
    export CXXFLAGS=$CFLAGS
fi
target=$lib/libtokenizers.a
marker=$lib/kvrouter_native.h

# build FEATURES sets kept to the library with these features of the crate, and compiles it
# if it is not cached.
build() {
    local key
    key=$( (cat native/Cargo.toml native/Cargo.lock native/src/*.rs; echo "$1"; rustc -vV; [ -z "$triple" ] || { echo "$triple"; cat scripts/build-native.sh; }) | sha256sum | cut -c1-16) || return
    kept=$cache/$key/libtokenizers.a
    [ ! -f "$kept" ] || return 0
    echo "build-native: compiling the tokenizer and template library (a minute or two)" >&3
    cargo build --locked --release --quiet --features "$1" \
        --manifest-path native/Cargo.toml --target-dir "$builds" ${triple:+--target "$triple"} || return
    mkdir -p "$cache/$key" &&
        cp "$built/libtokenizers.a" "$kept.$$" &&
        mv "$kept.$$" "$kept" # atomic, also with two builds at once
}

# The one unstable feature is permitted for this crate alone. A compiler that lacks it is
# tried anew each time: another reason for the failure must not weaken the library for good.
export RUSTC_BOOTSTRAP=tokenizers
exec 3>&2
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! build alloc_error_hook 2>"$log"; then
    build "" || exit 1
    echo "build-native: built without Rust's alloc_error_hook ($(grep -m 1 '^error' "$log" || echo "no error message")): a model file over its memory limit ends the process instead of being refused" >&2
fi
if ! cmp -s "$kept" "$target"; then
    mkdir -p "$lib"
    rm -f "$target"
    ln "$kept" "$target" 2>/dev/null || cp "$kept" "$target"
fi
if [ ! -f "$marker" ]; then
    echo '// Marks that libtokenizers.a is built.' >"$marker"
fi
