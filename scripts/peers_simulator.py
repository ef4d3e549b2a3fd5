"""Compares the trace simulator with Dynamo's run_mocker_trace_replay.

Every load is simulated by both in turn, with their defaults: 8 workers of 16,384
blocks of 64 tokens. CPU is user + system time: for kvrouter of the whole process, for
Dynamo of the call only, in a running process. Started by peers.sh in the venv of Dynamo.
"""

import argparse
import gzip
import json
import os
import resource
import statistics
import subprocess

os.environ["DYN_LOG"] = "error"  # one line per decision would cost more than the simulation
from dynamo._core import KvRouterConfig, run_mocker_trace_replay  # noqa: E402

import peers_common as peers  # noqa: E402

TRACES = ["conversation", "synthetic"]
LOADS = ["conc 64", "conc 256", "conc 512", "speedup 1", "speedup 2"]
TUNED = {"prefill_load_scale": 8.0, "overlap_score_credit": 2.0}
KEYS = ("reuse", "makespan", "ttft", "e2e")
# Our policy and its knobs, Dynamo's router mode and its knobs, and by what share
# makespan, TTFT and end-to-end may be apart. Reuse is held for round robin only, to
# 0.005: with kv Dynamo's own differs by up to 0.02 from one run to the next.
ROUTERS = {
    "round robin": ("round-robin", {}, "round_robin", None, 0.03),
    "kv": ("kv", {}, "kv_router", {}, 0.05),
    "kv tuned": ("kv", TUNED, "kv_router", TUNED, 0.05),
}


def cpu_of(who):
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def run_ours(program, trace, load, policy, knobs):
    kind, value = load.split()
    command = [program, "simulate", "--trace", trace, "--policy", policy, "--workers", "8", "--seed", "1", "--json",
               "--concurrency" if kind == "conc" else "--speedup", value]
    for name, knob in knobs.items():
        command += ["--" + name.replace("_", "-"), str(knob)]
    before = cpu_of(resource.RUSAGE_CHILDREN)
    out = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    r = json.loads(out)
    return {"reuse": r["reuse"], "makespan": r["makespan_s"], "ttft": r["ttft_ms"]["mean"], "e2e": r["end_to_end_ms"]["mean"],
            "cpu": cpu_of(resource.RUSAGE_CHILDREN) - before}


def run_dynamo(trace, load, mode, knobs):
    kind, value = load.split()
    options = {"replay_concurrency": int(value)} if kind == "conc" else {"arrival_speedup_ratio": float(value)}
    before = cpu_of(resource.RUSAGE_SELF)
    r = run_mocker_trace_replay([trace], num_workers=8, router_mode=mode, trace_block_size=512,
                                router_config=None if knobs is None else KvRouterConfig(**knobs), **options).summary
    return {"reuse": r["prefix_cache_reused_ratio"], "makespan": r["duration_ms"] / 1000, "ttft": r["mean_ttft_ms"],
            "e2e": r["mean_e2e_latency_ms"], "cpu": cpu_of(resource.RUSAGE_SELF) - before}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kvrouter", required=True)
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--loads", default=",".join(LOADS), help="conc N: in flight; speedup K: the trace's arrival times over K")
    options = parser.parse_args()
    peers.give_up_after(400)

    rows, results = [], {name: [] for name in ROUTERS}
    for name in options.traces.split(","):
        packed, plain = f"testdata/traces/{name}_trace.jsonl.gz", f"out/{name}_trace.jsonl"
        with gzip.open(packed) as source, open(plain, "wb") as target:
            target.write(source.read())
        for load in options.loads.split(","):
            for router, (policy, knobs, mode, their_knobs, _) in ROUTERS.items():
                ours = run_ours(options.kvrouter, packed, load, policy, knobs)
                theirs = run_dynamo(plain, load, mode, their_knobs)
                off = {key: ours[key] / theirs[key] - 1 for key in KEYS}
                results[router].append((ours, theirs, off))
                cells = [name, load, router, f"{ours['reuse']:.3f}", f"{theirs['reuse']:.3f}"]
                for key in KEYS[1:]:
                    cells += [f"{ours[key]:.1f}", f"{theirs[key]:.1f}", f"{off[key]:+.1%}"]
                rows.append(cells + [f"{ours['cpu']:.2f}", f"{theirs['cpu']:.2f}"])
        print(f"peers: simulated the {name} trace", file=peers.sys.stderr)
    print("Trace simulator, 8 workers: kvrouter simulate and run_mocker_trace_replay of ai-dynamo-runtime 1.6.1 side by side\n")
    head = ["trace", "load", "router", "reuse", "Dynamo"]
    for key in ("makespan s", "TTFT ms mean", "e2e ms mean"):
        head += [key, "Dynamo", "off"]
    peers.table(head + ["CPU s", "Dynamo"], rows)

    checks = peers.Checks("simulator")
    for router, (*_, share) in ROUTERS.items():
        runs = results[router]
        apart = max((ours["reuse"] - theirs["reuse"] for ours, theirs, _ in runs), key=abs)
        worst = {key: max((off[key] for _, _, off in runs), key=abs) for key in KEYS[1:]}
        checks.hold(all(abs(w) <= share for w in worst.values()) and (router != "round robin" or abs(apart) <= 0.005),
                    f"{router}, {len(runs)} loads: at most {share:.0%} off Dynamo: "
                    + ", ".join(f"{key} {w:+.1%}" for key, w in worst.items()) + f"; reuse {apart:+.4f}")
    cpu = [statistics.fmean(run[i]["cpu"] for runs in results.values() for run in runs) for i in (0, 1)]
    print(f"CPU a run, mean: kvrouter {cpu[0]:.2f} s, Dynamo {cpu[1]:.2f} s\n")
    checks.end()


if __name__ == "__main__":
    main()
