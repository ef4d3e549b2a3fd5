#!/usr/bin/env bash
# Installs SGLang for `--engine sglang`, once, into a venv under ${XDG_CACHE_HOME:-~/.cache}/kvrouter. If nvidia-smi lists
# no GPU, the CUDA packages are left out and a stand-in (internal/fleet/sglang/plugin) replaces the compiled kernels on the CPU.
# Concurrent calls wait for each other.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PROG=setup-sglang
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

# SGLang's wheels are tested with 3.11; their metadata allows 3.10 to 3.13.
PYTHON_CHECK='import sys, venv, ensurepip, fcntl
sys.exit(not (3, 10) <= sys.version_info < (3, 14))'
python=$(find_python "$PYTHON_CHECK") ||
  die "missing: python3 (3.10 to 3.13, with venv): Debian/Ubuntu: sudo apt install python3-venv; macOS: brew install python@3.12; Fedora: sudo dnf install python3.12"
take_lock "$python" setup-sglang
mkdir -p "$CACHE/log"
log="$CACHE/log/sglang.log"

# CUDA packages, which SGLang does not import on a machine without a GPU.
cuda_packages=(
  cuda-python flash-attn-4 flashinfer-python humming-kernels nvidia-cutlass-dsl nvidia-mathdx nvidia-ml-py nvshmem4py-cu13
  quack-kernels sgl-deep-ep sgl-deep-gemm sgl-flash-mla sglang-kernel tilelang torch-memory-saver
)
nixl=("nixl==$NIXL_VERSION" "nixl-cu12==$NIXL_VERSION" "nixl-cu13==$NIXL_VERSION")

if has_gpu; then
  venv="$SGLANG_GPU" want="sglang==$SGLANG_VERSION ${nixl[*]}" size="about 5 minutes and 10 GB"
else
  if [ "$(uname -sm)" != "Linux x86_64" ]; then
    die "SGLang without a GPU is supported on Linux x86_64 only, this is $(uname -sm); kvrouter itself works here: go run . http://HOST:PORT"
  fi
  # The torch version of vLLM for the CPU instead of SGLang's pinned one, so that both share one download.
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
  say "ready ($SECONDS s); installed in $CACHE"
fi
