#!/usr/bin/env bash
# Runs every fuzz target of the module in turn, each for FUZZTIME. Stops at the first crash and prints the file with its
# input, which `go test` then runs as a regression test.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
time=${FUZZTIME:-10s}

list=$(go test -list '^Fuzz' ./...)
targets=$(awk '/^Fuzz/ {names[n++] = $1} /^ok/ {for (i = 0; i < n; i++) print $2, names[i]; n = 0}' <<<"$list")
while read -r package target; do
  echo "fuzz: $package $target for $time"
  folder=$(go list -f '{{.Dir}}' "$package")/testdata/fuzz/$target
  before=$(ls "$folder" 2>/dev/null || true)
  if ! go test -run '^$' -fuzz "^$target\$" -fuzztime "$time" "$package"; then
    for input in $(comm -13 <(echo "$before") <(ls "$folder" 2>/dev/null)); do
      echo "fuzz: $target fails with $folder/$input"
    done
    exit 1
  fi
done <<<"$targets"
echo "fuzz: $(wc -l <<<"$targets") targets for $time each, no crash"
