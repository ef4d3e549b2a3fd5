#!/usr/bin/env bash
# Streams one chat through the router and prints the worker and the predicted and actual cached tokens of the prompt.
set -euo pipefail
PROG=ping
# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/scripts/lib.sh"

usage() {
  cat <<'END'
usage: ./ping.sh [--url URL] [--model NAME] [--prompt TEXT] [--max-tokens N] [--api-key KEY] [--wait SECONDS]
  --url URL        base URL of the router (default $KVROUTER_URL, else http://localhost:8000)
  --model NAME     model (default: the first of /v1/models)
  --prompt TEXT    user message (default: a short question); the system prompt is long enough to be cached
  --max-tokens N   maximum output length in tokens (default 64)
  --api-key KEY    bearer key (default $KVROUTER_API_KEY)
  --wait SECONDS   maximum wait for the first ready worker (default 600)
Run it twice: the second run finds the prompt's full blocks in a worker's prefix cache.
END
}

url=${KVROUTER_URL:-http://localhost:8000} model="" prompt="What is the capital of France?" max_tokens=64
api_key=${KVROUTER_API_KEY:-} wait=600
while [ $# -gt 0 ]; do
  case $1 in
    --url) need_value "$1" $#; url=$2; shift 2 ;;
    --model) need_value "$1" $#; model=$2; shift 2 ;;
    --prompt) need_value "$1" $#; prompt=$2; shift 2 ;;
    --max-tokens) need_value "$1" $#; max_tokens=$2; shift 2 ;;
    --api-key) need_value "$1" $#; api_key=$2; shift 2 ;;
    --wait) need_value "$1" $#; wait=$2; shift 2 ;;
    -h | --help) usage; exit 0 ;;
    *) die "unknown argument $1 (see --help)" ;;
  esac
done
url=${url%/} url=${url%/v1}
[[ $max_tokens =~ ^[1-9][0-9]*$ ]] || die "--max-tokens $max_tokens: must be an integer of at least 1"
[[ $wait =~ ^[0-9]+$ ]] || die "--wait $wait: must be an integer"
for tool in curl python3; do
  command -v "$tool" >/dev/null 2>&1 || die "missing: $tool (Debian/Ubuntu: sudo apt install $tool; macOS: brew install $tool; Fedora: sudo dnf install $tool)"
done

wait_for_worker "$url" "$wait"
models=$(fetch_models "$url" "$api_key")
if [ -z "$model" ]; then
  model=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])' <<<"$models" 2>/dev/null) ||
    die "$url/v1/models lists no model yet; wait until a worker is ready, or set --model"
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The system prompt is a few blocks long, so that a second ping hits a prefix cache.
python3 - "$model" "$prompt" "$max_tokens" >"$work/request.json" <<'END'
import json, sys
model, prompt, max_tokens = sys.argv[1:]
system = ("You are a helpful assistant who answers briefly and to the point. "
          "If a question has one right answer, say it in one sentence. "
          "If it has several, name the most usual one first and then at most two others. "
          "Do not repeat the question, do not apologise, and do not offer further help. "
          "Use plain words and short sentences, no lists, no headings and no emphasis. "
          "If you do not know the answer, say that you do not know it. "
          "If the question rests on an error, say so in a few words before you answer. "
          "Numbers come with their units, dates with their year, and names in full when first used.")
print(json.dumps({
    "model": model,
    "messages": [{"role": "system", "content": system}, {"role": "user", "content": prompt}],
    "max_tokens": int(max_tokens),
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
}))
END

# show.py starts curl itself, so that the times exclude Python's start-up.
cat >"$work/show.py" <<'END'
import json, subprocess, sys, time

headers_file, curl = sys.argv[1], sys.argv[2:]
started = time.time()
process = subprocess.Popen(curl, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8", errors="replace")
first, usage, error, other = None, {}, None, []
for line in process.stdout:
    line = line.strip()
    if not line.startswith("data:"):
        if line and not line.startswith((":", "event:", "id:", "retry:")):
            other.append(line)
        continue
    data = line[5:].strip()
    if data == "[DONE]":
        continue
    try:
        chunk = json.loads(data)
    except ValueError:
        other.append(data)
        continue
    if chunk.get("error"):
        error = chunk["error"]
        continue
    usage = chunk.get("usage") or usage
    for choice in chunk.get("choices") or []:
        delta = choice.get("delta") or {}
        piece = (delta.get("reasoning_content") or delta.get("reasoning") or "") + (delta.get("content") or "")
        if piece:
            first = first or time.time()
            print(piece, end="", flush=True)
ended = time.time()
if first:
    print()
if process.wait() != 0:
    sys.exit("ping: " + (process.stderr.read().strip() or f"curl exited with status {process.returncode}"))

headers, status = {}, ""
with open(headers_file) as file:
    for line in file:  # the last block counts, because a 100 Continue may come first
        if line.startswith("HTTP/"):
            headers, status = {}, line.split(None, 2)[1]
        elif ":" in line:
            name, value = line.split(":", 1)
            headers[name.lower()] = value.strip()

if status != "200" or error or not (first or usage):
    body = " ".join(other)
    try:
        error = error or json.loads(body).get("error")
    except (ValueError, AttributeError):
        pass
    message = error.get("message") if isinstance(error, dict) else error
    sys.exit(f"ping: HTTP {status}: {message or body[:300] or 'empty response'}")

prompt_tokens = usage.get("prompt_tokens", "?")
cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", "not reported")
overlap = headers.get("x-kvrouter-overlap-tokens", "not reported")
rows = [("worker", headers.get("x-kvrouter-worker-id", "not reported (is this a kvrouter?)"))]
if "x-kvrouter-prefill-worker-id" in headers:
    took = headers.get("x-kvrouter-prefill-ms")
    rows.append(("prompt", f"computed by worker {headers['x-kvrouter-prefill-worker-id']}" + (f" in {float(took):.0f} ms" if took else "")))
rows += [
    ("predicted overlap", f"{overlap} of {prompt_tokens} prompt tokens"),
    ("actually cached", f"{cached} of {prompt_tokens} prompt tokens"),
    ("answer", f"{usage.get('completion_tokens', '?')} tokens, the first after {((first or ended) - started) * 1000:.0f} ms, "
               f"all after {(ended - started) * 1000:.0f} ms"),
    ("request id", headers.get("x-request-id", "not reported")),
]
print()
for name, value in rows:
    print(f"{name + ':':<19}{value}")
END

auth_header "$api_key" >"$work/curlrc"
python3 "$work/show.py" "$work/headers" \
  curl -sSN -m 300 -D "$work/headers" --config "$work/curlrc" -H 'Content-Type: application/json' \
  --data-binary @"$work/request.json" "$url/v1/chat/completions"
