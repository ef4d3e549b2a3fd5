#!/usr/bin/env bash
# Prepares what `--engine sglang` needs beside `make setup`, once: a venv under ${XDG_CACHE_HOME:-~/.cache}/kvrouter
# with SGLang, whole where nvidia-smi lists a GPU, else without its CUDA packages: the CPU runs the rest of it with a
# stand-in for its compiled kernels (internal/sglang/plugin).
# Several may run at once: the second waits for the first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PROG=setup-sglang
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

# SGLang's wheels are tried with 3.11 and, by their metadata, run with 3.10 to 3.13.
PYTHON_CHECK='import sys, venv, ensurepip, fcntl
sys.exit(not (3, 10) <= sys.version_info < (3, 14))'
python=$(find_python "$PYTHON_CHECK") ||
  die "missing: python3 (3.10 to 3.13, with venv): Debian/Ubuntu: sudo apt install python3-venv; macOS: brew install python@3.12; Fedora: sudo dnf install python3.12"
take_lock "$python" setup-sglang
mkdir -p "$CACHE/log"
log="$CACHE/log/sglang.log"

# Of CUDA, for a machine without: SGLang imports none of them there.
cuda_packages=(
  cuda-python flash-attn-4 flashinfer-python humming-kernels nvidia-cutlass-dsl nvidia-mathdx nvidia-ml-py nvshmem4py-cu13
  quack-kernels sgl-deep-ep sgl-deep-gemm sgl-flash-mla sglang-kernel tilelang torch-memory-saver
)
nixl=("nixl==$NIXL_VERSION" "nixl-cu12==$NIXL_VERSION" "nixl-cu13==$NIXL_VERSION")

if has_gpu; then
  venv="$SGLANG_GPU" want="sglang==$SGLANG_VERSION ${nixl[*]}" size="about 5 minutes and 10 GB"
else
  if [ "$(uname -sm)" != "Linux x86_64" ]; then
    die "SGLang without a GPU is tried on Linux x86_64 only, this is $(uname -sm); kvrouter itself works here: go run . --engine none --worker url=http://HOST:PORT"
  fi
  # The torch that vLLM for the CPU has, in place of the one that SGLang pins: the two share one download.
  venv="$SGLANG_CPU" want="sglang==$SGLANG_VERSION torch==$TORCH_VERSION without CUDA ${nixl[*]}" size="half a minute after make setup, minutes without, and 6 GB"
fi

install() {
  make_venv "$python" "$venv" "$log"
  if has_gpu; then
    uv_install "$venv" "$log" "sglang==$SGLANG_VERSION"
  else
    printf '%s\n' "${cuda_packages[@]}" >"$venv/excludes.txt"
    echo "torch==$TORCH_VERSION" >"$venv/overrides.txt"
    uv_install "$venv" "$log" --overrides "$venv/overrides.txt" --excludes "$venv/excludes.txt" "sglang==$SGLANG_VERSION"
  fi
  uv_install "$venv" "$log" --no-deps "${nixl[@]}"
  run_logged "$log" "$venv/bin/python" -c 'import sglang; from nixl._api import nixl_agent'
}

if ! is_stamped "$venv" "$want"; then
  say "SGLang $SGLANG_VERSION: $size the first time (log: $log)"
  : >"$log"
  install
  stamp "$venv" "$want"
  say "ready ($SECONDS s); everything is kept in $CACHE"
fi
