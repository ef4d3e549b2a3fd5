#!/usr/bin/env python3
"""Every policy on the simulator, as the tables of docs/measured.md: 8 simulated workers, the two traces of testdata and
made-up agents. Each figure is the mean over the seeds, which draw the agents as well as the choices between equals.

Only Python's standard library is needed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from bench_real import build_router, policy_names, policy_variants

ROOT = Path(__file__).resolve().parent.parent
TRACE = "testdata/traces/{}_trace.jsonl.gz"
WORKLOADS = {
    "conversation trace, 256 in flight": ["--trace", TRACE.format("conversation"), "--concurrency", "256"],
    "synthetic trace, 256 in flight": ["--trace", TRACE.format("synthetic"), "--concurrency", "256"],
    "agents, 64 workflows in flight": ["--synthetic", "agentic", "--concurrency", "64"],
    "agents, 256 workflows in flight": ["--synthetic", "agentic", "--agentic-workflows", "1200", "--concurrency", "256"],
}
TUNED = ["--prefill-load-scale", "8", "--overlap-score-credit", "2"]


def runs(names, workload):
    """(label, flags) of every row of a workload's table."""
    for name in names:
        for label, flags in policy_variants(name):
            yield label, ["--policy", name, *flags]
        if name == "kv":
            yield "kv, tuned", ["--policy", name, *TUNED]
        if name == "thompson" and "agentic" in workload:
            yield "thompson, no hints", ["--policy", name, "--no-synthetic-hints"]


def simulate(binary, workload, flags, seed):
    command = [binary, "simulate", *workload, *flags, "--workers", "8", "--seed", str(seed), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
    return json.loads(done.stdout)


COLUMNS = [
    ("reuse", "{:.3f}", lambda r: r["reuse"]),
    ("TTFT mean, ms", "{:.1f}", lambda r: r["ttft_ms"]["mean"]),
    ("p99", "{:.0f}", lambda r: r["ttft_ms"]["p99"]),
    ("ITL mean, ms", "{:.1f}", lambda r: r["itl_ms"]["mean"]),
    ("end to end mean, ms", "{:.0f}", lambda r: r["end_to_end_ms"]["mean"]),
    ("output tokens/s", "{:.0f}", lambda r: r["output_tokens_per_s"]),
    ("busiest / mean worker", "{:.2f}", lambda r: balance([w["busy"] for w in r["balance"]])),
]


def balance(busy):
    return max(busy) / statistics.mean(busy)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default="", metavar="A,B", help="these alone (default: all)")
    parser.add_argument("--seeds", default="1,2,3", metavar="A,B", help="one run each (default %(default)s)")
    parser.add_argument("--binary", default="", metavar="FILE", help="a built kvrouter (default: build it)")
    args = parser.parse_args()
    out = ROOT / "out" / "sim"
    out.mkdir(parents=True, exist_ok=True)
    binary = Path(args.binary).resolve() if args.binary else build_router(out)
    names = args.policies.split(",") if args.policies else policy_names(binary)
    for title, workload in WORKLOADS.items():
        print(f"{title}:\n")
        print("| policy | " + " | ".join(name for name, _, _ in COLUMNS) + " |")
        print("|---" * (len(COLUMNS) + 1) + "|")
        for label, flags in runs(names, workload):
            reports = [simulate(binary, workload, flags, seed) for seed in args.seeds.split(",")]
            cells = [form.format(statistics.mean(map(value, reports))) for _, form, value in COLUMNS]
            print(f"| {label} | " + " | ".join(cells) + " |", flush=True)
        print()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except (RuntimeError, OSError, subprocess.CalledProcessError) as problem:
        sys.exit(f"sim: {problem}")
