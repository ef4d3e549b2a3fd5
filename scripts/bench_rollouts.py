#!/usr/bin/env python3
"""Benchmarks a step of RL training behind kvrouter and behind vllm-router: how long it takes, and what the workers find
cached.

Of each prompt several trajectories are sampled. A trajectory is a loop of chats: each prompt is the previous one, its
answer and an observation of the environment, which takes a while. The numbers of turns are log-uniform, so that a few
trajectories are far longer than most. Every request has the trajectory's id as X-Session-ID. The workers are simulated
ones, the same for all routers; their caches are emptied before each.

  scripts/bench_rollouts.py --vllm-router FILE            kvrouter and five policies of vllm-router
  scripts/bench_rollouts.py --vllm-router FILE --blocks 600    caches that are too small for all trajectories

Only Python's standard library is needed. The exit code is 0 if every request was answered.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import bench_real
import peers_common as peers
from bench_real import ROOT, Router, all_counters, chat, first_model, make_prose, percentile, print_rows

LONGEST = 7000  # tokens of a prompt after which a trajectory ends: simulated workers take 8,192
PEERS = ("round_robin", "consistent_hash", "sticky_least_loaded", "cache_aware", "kv_aware")
LABELS = ["router", "step, s", "over the shortest", "hit rate", "TTFT mean, ms", "p99", "turns", "errors"]


def trajectories(args):
    """For each trajectory its id, its first messages, and the turns: maximum tokens, observation, seconds until it comes."""
    rng = random.Random(args.seed)
    log_uniform = lambda least, most: least * (most / least) ** rng.random()
    made = []
    for _ in range(args.prompts):
        first = [{"role": "system", "content": make_prose(rng, args.prompt_words)}]
        for _ in range(args.samples):
            turns = [(1 + int(rng.expovariate(1 / args.output)), make_prose(rng, 1 + int(rng.expovariate(1 / args.observation_words))), log_uniform(0.05, 1))
                     for _ in range(round(log_uniform(args.least_turns, args.most_turns)))]  # fmt: skip
            made.append((f"trajectory-{len(made)}", first, turns))
    return made


def step(name, url, workers, args):
    """A row of the table, and the errors."""
    model, all_of, answers, lock = first_model(url)["id"], trajectories(args), [], threading.Lock()

    def run(trajectory):
        session, first, turns = trajectory
        messages = [*first, {"role": "user", "content": "Begin."}]
        for limit, observation, pause in turns:
            answer = chat(url, model, messages, limit, {"X-Session-ID": session})
            with lock:
                answers.append(answer)
            if answer.error or answer.prompt > LONGEST:
                return
            messages = [*messages, {"role": "assistant", "content": answer.text}, {"role": "user", "content": observation}]
            time.sleep(pause)

    before, began = all_counters(workers, "mocker"), time.monotonic()
    threads = [threading.Thread(target=run, args=(t,), daemon=True) for t in all_of]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    took, after = time.monotonic() - began, all_counters(workers, "mocker")
    good = sorted(1000 * a.first_chunk for a in answers if not a.error) or [0.0]
    errors = [a.error for a in answers if a.error]
    hit = (after[0] - before[0]) / max(1, after[1] - before[1])
    return [name, took, hit, sum(good) / len(good), percentile(good, 99), len(answers), len(errors)], errors


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="", metavar="FILE", help="path of a kvrouter binary (default: build it)")
    parser.add_argument("--vllm-router", required=True, metavar="FILE", help="path of vllm-router")
    parser.add_argument("--policies", default=",".join(PEERS), help="policies of vllm-router (default %(default)s)")
    parser.add_argument("--model", default="", metavar="DIR", help="model for kvrouter (default: kvrouter's default)")
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="number of workers (default %(default)s)")
    parser.add_argument("--blocks", type=int, default=4096, metavar="N", help="KV blocks of 64 tokens per worker (default %(default)s)")
    parser.add_argument("--prompts", type=int, default=16, metavar="N", help="prompts of the step (default %(default)s)")
    parser.add_argument("--samples", type=int, default=6, metavar="N", help="trajectories of each prompt (default %(default)s)")
    parser.add_argument("--least-turns", type=int, default=6, metavar="N", help="least turns of a trajectory (default %(default)s)")
    parser.add_argument("--most-turns", type=int, default=40, metavar="N", help="most turns of a trajectory (default %(default)s)")
    parser.add_argument("--prompt-words", type=int, default=800, metavar="N", help="words of a prompt (default %(default)s)")
    parser.add_argument("--observation-words", type=int, default=120, metavar="N", help="mean words of an observation (default %(default)s)")
    parser.add_argument("--output", type=int, default=60, metavar="N", help="mean tokens of an answer (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="seed of the step and of the router (default %(default)s)")
    parser.add_argument("--startup-timeout", type=float, default=60, metavar="S", help="maximum start time of router and workers, seconds (default %(default)g)")
    parser.add_argument("router_args", nargs="*", metavar="-- FLAG", help="additional flags of kvrouter")
    args = parser.parse_args()
    bench_real.at_least_one(parser, args, "workers", "blocks", "prompts", "samples", "least_turns", "prompt_words", "observation_words", "output")
    if args.most_turns < args.least_turns:
        parser.error("--most-turns must be at least --least-turns")
    args.engine, args.shared, args.offload_gib, args.engine_args = "mocker", True, 0, []
    return args


def main():
    args = parse_arguments()
    out = ROOT / "out" / "bench-rollouts"
    out.mkdir(parents=True, exist_ok=True)
    binary = Path(args.binary).resolve() if args.binary else bench_real.build_router(out)
    turns = sum(len(t[2]) for t in trajectories(args))
    print(f"{args.prompts} prompts, {args.samples} trajectories each, {turns} turns over {args.workers} workers with {args.blocks} blocks, seed {args.seed}",
          flush=True)  # fmt: skip
    rows, errors = [], []
    owner = Router(binary, ["--policy", "round-robin"], args, out / "workers.log")
    with owner:

        def measure(name, url):
            print(name, flush=True)
            row, failed = step(name, url, owner.workers, args)
            rows.append(row)
            errors.extend(failed)

        owner.empty_caches()
        with Router(binary, ["--policy", "work"], args, out / "kvrouter.log", owner.worker_flags()) as router:
            measure("kvrouter", router.http)
        for policy in args.policies.split(","):
            owner.empty_caches()
            port, metrics = peers.free_ports(2)
            with open(out / f"{policy}.log", "w") as log:
                theirs = subprocess.Popen(
                    [args.vllm_router, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics), "--policy", policy,
                     "--log-level", "warning", "--worker-urls", *owner.workers], stdout=log, stderr=log, start_new_session=True)  # fmt: skip
                try:
                    peers.wait_for("vllm-router", 60, lambda: peers.answers(f"http://127.0.0.1:{port}/health"))
                    measure(f"vllm-router {policy}", f"http://127.0.0.1:{port}")
                finally:
                    peers.end_all([theirs])
    least = min(row[1] for row in rows)
    print()
    print_rows([LABELS, *([name, f"{took:.1f}", f"{took / least:.2f}", f"{hit:.3f}", f"{mean:.0f}", f"{p99:.0f}", str(n), str(bad)]
                          for name, took, hit, mean, p99, n, bad in rows)])  # fmt: skip
    for error in sorted(set(errors))[:5]:
        print(f"bench-rollouts: {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    bench_real.run(main, "bench-rollouts")
