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

key=$( (cat native/Cargo.toml native/Cargo.lock native/src/*.rs; rustc -vV; [ -z "${1:-}" ] || { echo "$1"; cat scripts/build-native.sh; }) | sha256sum | cut -c1-16)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kvrouter/native
kept=$cache/$key/libtokenizers.a
lib=native/lib
builds=$cache/target
built=$builds/release
if [ -n "${1:-}" ]; then
    lib=native/target/$1
    builds=$cache/target-dist
    built=$builds/$1/release
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
    crates=${CARGO_HOME:-$HOME/.cargo}
    # A static program cannot look up getrandom at run time: without this setting it would need /dev/urandom.
    export RUSTFLAGS="--cfg getrandom_backend=\"linux_getrandom\" --remap-path-prefix=$PWD/native=/native --remap-path-prefix=$crates=/cargo --remap-path-prefix=$builds=/target"
    export CFLAGS="-ffile-prefix-map=$crates=/cargo -ffile-prefix-map=$builds=/target"
    export CXXFLAGS=$CFLAGS
fi
target=$lib/libtokenizers.a
marker=$lib/kvrouter_native.h

if [ ! -f "$kept" ]; then
    echo "build-native: compiling the tokenizer and template library (a minute or two)" >&2
    # The crate's one unstable feature (native/src/lib.rs) is permitted for it alone.
    RUSTC_BOOTSTRAP=tokenizers cargo build --locked --release --quiet \
        --manifest-path native/Cargo.toml --target-dir "$builds" ${1:+--target "$1"}
    mkdir -p "$cache/$key"
    cp "$built/libtokenizers.a" "$kept.$$"
    mv "$kept.$$" "$kept" # atomic, also with two builds at once
fi
if ! cmp -s "$kept" "$target"; then
    mkdir -p "$lib"
    rm -f "$target"
    ln "$kept" "$target" 2>/dev/null || cp "$kept" "$target"
fi
if [ ! -f "$marker" ]; then
    echo '// Marks that libtokenizers.a is built.' >"$marker"
fi
