#!/usr/bin/env bash
# Benchmarks the router with genai-perf or aiperf and prints the tool's table. The first run installs the tool into its
# own venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
PROG=perf
# shellcheck source=scripts/lib.sh
. scripts/lib.sh

usage() {
  cat <<'END'
usage: ./perf.sh [flags] [-- arguments of the tool]
                                                        default   on the CPU model
  --tool genai-perf|aiperf                           genai-perf   genai-perf
  --input-tokens N      prompt length, tokens              3000   600
  --output-tokens N     output length, tokens               100   20
  --concurrency N       in-flight requests                   25   4
  --requests N          total requests                      100   24
  --unique-prompts N    distinct prompts                     10   10
  --seed N              seed of the synthetic prompts        42   42
  --url URL             $KVROUTER_URL, else http://localhost:8000
  --model NAME          the first of /v1/models
  --tokenizer DIR|ID    the model's own
  --api-key KEY         $KVROUTER_API_KEY
  --wait SECONDS        600, for the first ready worker
Flags override the sizes for the CPU model. The tool's output files are written to out/perf/.
END
}

tool=genai-perf url=${KVROUTER_URL:-http://localhost:8000} model="" tokenizer="" api_key=${KVROUTER_API_KEY:-} seed=42 wait=600
input_tokens="" output_tokens="" concurrency="" requests="" unique_prompts=""
while [ $# -gt 0 ]; do
  case $1 in
    --) shift; break ;;
    --tool) need_value "$1" $#; tool=$2; shift 2 ;;
    --input-tokens | --output-tokens | --concurrency | --requests | --unique-prompts | --seed | --wait)
      need_value "$1" $#
      [[ $2 =~ ^[0-9]+$ ]] || die "$1 $2: must be an integer"
      name=${1#--}
      printf -v "${name//-/_}" %s "$2"
      shift 2 ;;
    --url) need_value "$1" $#; url=$2; shift 2 ;;
    --model) need_value "$1" $#; model=$2; shift 2 ;;
    --tokenizer) need_value "$1" $#; tokenizer=$2; shift 2 ;;
    --api-key) need_value "$1" $#; api_key=$2; shift 2 ;;
    -h | --help) usage; exit 0 ;;
    *) die "unknown argument $1 (see --help)" ;;
  esac
done
url=${url%/} url=${url%/v1}
case $tool in genai-perf | aiperf) ;; *) die "--tool $tool: must be genai-perf or aiperf" ;; esac
command -v curl >/dev/null 2>&1 || die "missing: curl (Debian/Ubuntu: sudo apt install curl; Fedora: sudo dnf install curl)"

# The current releases need at least 3.11 (aiperf) and are tested up to 3.13.
python=$(find_python 'import sys, venv, ensurepip, fcntl; sys.exit(not (3, 11) <= sys.version_info < (3, 14))') ||
  die "missing: python3 (3.11 to 3.13, with venv): Debian/Ubuntu: sudo apt install python3-venv; macOS: brew install python@3.12; Fedora: sudo dnf install python3.12"

# --- the model ------------------------------------------------------------------------------------------------------

wait_for_worker "$url" "$wait"
models=$(fetch_models "$url" "$api_key")
# Two lines: the model's name, and its folder or hub id.
found=$("$python" -c '
import json, sys
wanted, models = sys.argv[1], json.load(sys.stdin)["data"]
model = next((m for m in models if wanted in ("", m["id"])), None)
if model is None:
    sys.exit(1)
print(model["id"])
print(model.get("root") or model["id"])' "$model" <<<"$models" 2>/dev/null) ||
  die "$url/v1/models lists no model${model:+ named $model}"
model=${found%%$'\n'*} root=${found#*$'\n'}

# SGLang reports the served name as the root; its /model_info reports the path of the files.
if [ "$root" = "$model" ]; then
  path=$(curl -sS -m 10 --config <(auth_header "$api_key") "$url/model_info" 2>/dev/null |
    "$python" -c 'import json, sys; print(json.load(sys.stdin).get("tokenizer_path") or "")' 2>/dev/null) || path=""
  root=${path:-$root}
fi

on_cpu=no
case "$(printf '%s %s' "$model" "$root" | tr '[:upper:]' '[:lower:]')" in *smollm2-135m*) on_cpu=yes ;; esac

if [ -z "$tokenizer" ]; then
  if [ -f "$root/tokenizer.json" ]; then
    tokenizer=$root
  elif [ "$on_cpu" = yes ] && [ -d "$CACHE/smollm2-135m-instruct" ]; then
    tokenizer=$CACHE/smollm2-135m-instruct
  else
    tokenizer=$root
  fi
fi

# --- sizes ----------------------------------------------------------------------------------------------------------

# size NAME DEFAULT CPU-DEFAULT sets one size and records where the CPU's differs from the default.
changed=""
size() {
  local value=$2
  [ -z "${!1}" ] || return 0
  if [ "$on_cpu" = yes ] && [ "$3" != "$2" ]; then
    value=$3
    changed+="${changed:+, }--${1//_/-} $2 -> $3"
  fi
  printf -v "$1" %s "$value"
}
size input_tokens 3000 600
size output_tokens 100 20
size concurrency 25 4
size requests 100 24
size unique_prompts 10 10
[ -z "$changed" ] || say "reduced sizes for the CPU model $model: $changed (flags override)"
for name in input_tokens output_tokens concurrency requests unique_prompts; do
  [ "${!name}" -ge 1 ] || die "--${name//_/-} ${!name}: must be at least 1"
done
if [ "$concurrency" -gt "$requests" ]; then
  say "--concurrency $concurrency exceeds --requests $requests; using $requests"
  concurrency=$requests
fi

# --- the tool -------------------------------------------------------------------------------------------------------

venv="$CACHE/$tool"
log="$CACHE/log/$tool.log"

install_aiperf() {
  local want="aiperf==0.13.0"
  is_stamped "$venv" "$want" && return
  say "installing $want (about 20 s; log: $log)"
  make_venv "$python" "$venv" "$log"
  uv_install "$venv" "$log" "$want"
  stamp "$venv" "$want"
}

# genai-perf runs the C++ program perf_analyzer, which its dependency of that name no longer contains; tritonclient 2.50.0
# does. tritonclient is installed last and without dependencies, because only that program is needed.
install_genai_perf() {
  local want="genai-perf==0.0.16 tritonclient==2.50.0 nvidia-cuda-runtime-cu12==12.9.79"
  is_stamped "$venv" "$want" && return
  case "$(uname -sm)" in
    "Linux x86_64" | "Linux aarch64") ;;
    *) die "genai-perf's perf_analyzer supports Linux only, this is $(uname -sm): use --tool aiperf" ;;
  esac
  say "installing genai-perf 0.0.16 (about 30 s; log: $log)"
  make_venv "$python" "$venv" "$log"
  uv_install "$venv" "$log" genai-perf==0.0.16 nvidia-cuda-runtime-cu12==12.9.79
  uv_install "$venv" "$log" --no-deps --reinstall tritonclient==2.50.0
  stamp "$venv" "$want"
}

# library_path sets LD_LIBRARY_PATH for the libraries of perf_analyzer: the CUDA runtime (from the venv) and libb64 (the
# system's, else unpacked from Debian's package, which needs no root).
library_path() {
  local cudart
  cudart=$(echo "$venv"/lib/python3*/site-packages/nvidia/cuda_runtime/lib)
  export LD_LIBRARY_PATH="$cudart:$venv/lib/b64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
  if ldd "$venv/bin/perf_analyzer" | grep -q 'libb64\.so.*not found'; then
    unpack_libb64 >>"$log" 2>&1 ||
      die "missing: libb64.so.0d, which perf_analyzer links: Debian/Ubuntu: sudo apt install libb64-0d; elsewhere: build libb64 1.2, or use --tool aiperf"
  fi
  if ldd "$venv/bin/perf_analyzer" | grep 'not found' >&2; then
    die "perf_analyzer needs the libraries above: install them, or use --tool aiperf"
  fi
}

unpack_libb64() {
  local work status=0
  work=$(mktemp -d)
  (
    cd "$work"
    apt-get download libb64-0d || { apt-get update && apt-get download libb64-0d; }
    dpkg-deb -x libb64-0d_*.deb .
    mkdir -p "$venv/lib/b64"
    cp -a "$(dirname "$(find . -name 'libb64.so.0d' | head -n 1)")"/libb64.so.0d* "$venv/lib/b64/"
  ) || status=$?
  rm -rf "$work"
  return "$status"
}

mkdir -p "$CACHE/log"
take_lock "$python" "perf-$tool"
"install_${tool//-/_}"
[ "$tool" = aiperf ] || library_path
exec 9>&-

# --- the run --------------------------------------------------------------------------------------------------------

out="$PWD/out/perf/$tool"
mkdir -p "$out"
say "$tool on $url, model $model: $requests requests of $input_tokens + $output_tokens tokens, concurrency $concurrency, $unique_prompts distinct prompts, seed $seed"
# A pipe has no width, and the default of 80 columns truncates the table headings.
[ -t 1 ] || export COLUMNS=${COLUMNS:-120}
# Offline mode would block tokenizers named by hub id; a tokenizer in a folder needs no hub.
unset HF_HUB_OFFLINE

# ignore_eos and min_tokens fix the output length, so that runs are comparable.
common=(
  --model "$model" --tokenizer "$tokenizer" --url "$url" --endpoint-type chat --streaming
  --synthetic-input-tokens-mean "$input_tokens" --synthetic-input-tokens-stddev 0
  --output-tokens-mean "$output_tokens" --output-tokens-stddev 0
  --extra-inputs "min_tokens:$output_tokens" --extra-inputs "ignore_eos:true"
  --concurrency "$concurrency" --request-count "$requests" --num-prompts "$unique_prompts"
  --random-seed "$seed" --artifact-dir "$out"
)
# counters prints the router's metrics; a server that is no kvrouter, or needs a key for them, has none.
counters() { curl -s -m 10 --config <(auth_header "$api_key") "$url/metrics" | grep '^kvrouter_' || true; }
before=$(counters) status=0
case $tool in
  aiperf)
    "$venv/bin/aiperf" profile "${common[@]}" --ui none ${api_key:+--api-key "$api_key"} "$@" || status=$?
    ;;
  genai-perf)
    # genai-perf finds perf_analyzer on PATH.
    PATH="$venv/bin:$PATH" "$venv/bin/genai-perf" profile "${common[@]}" --extra-inputs "max_tokens:$output_tokens" \
      ${api_key:+--header "Authorization:Bearer $api_key"} -- -v --max-threads 64 "$@" || status=$?
    ;;
esac

# What the router counted of the run, on one line.
"$python" - "$before" "$(counters)" <<'END' || true
import re, sys

def read(text):
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in text.splitlines())}

before, after = map(read, sys.argv[1:])

def of(name, label=""):
    """The increase of a counter, by the value of a label."""
    found = {}
    for series, value in after.items():
        if series.partition("{")[0] == name:
            key = re.search(rf'\b{label}="([^"]*)"', series) if label else None
            key = key[1] if key else ""
            found[key] = found.get(key, 0) + value - before.get(series, 0)
    return found

compared, predictions = sum(of("kvrouter_compared_prompt_tokens_total").values()), of("kvrouter_predictions_total", "result")
requests = {worker: n for worker, n in sorted(of("kvrouter_requests_total", "worker_id").items()) if n}
parts = []
if compared:
    parts.append(f"{sum(of('kvrouter_cached_tokens_reported_total').values()) / compared:.1%} of the prompt tokens were cached")
if total := sum(predictions.values()):
    parts.append(f"{predictions.get('exact', 0):.0f} of {total:.0f} predictions were exact")
if requests:
    parts.append("requests: " + ", ".join(f"{n:.0f} at worker {worker}" for worker, n in requests.items()))
if parts:
    print("perf: the router: " + "; ".join(parts))
END
exit "$status"
