#!/usr/bin/env python3
"""Benchmarks a flood beside light chats with real engines: how long each waits for its first token, with and without
`--router-queue-policy fair`.

Two vLLM CPU workers run 8 requests at once each. The flood is a tenant with 32 clients that send the next chat as soon
as they have an answer. The light tenant has 2 clients that pause between their chats. Each setup first serves the light
tenant alone, then both. First tokens are measured by the clients, hit rates are from the engines' own counters.

  scripts/bench_fair.py                        no queue, then a fair queue: about 10 minutes
  scripts/bench_fair.py --seconds 300          longer
  scripts/bench_fair.py --classes              the light tenant is of class interactive, the flood of class batch
  scripts/bench_fair.py --engine mocker        simulated workers, which start at once
  scripts/bench_fair.py -- --policy kv         further flags of kvrouter

Only Python's standard library is needed. The exit code is 0 if every request was answered, whatever the times.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import bench_real
from bench_real import ROOT, Router, all_counters, chat, first_model, get, make_prose, percentile, print_rows

TENANT_HEADER, CLASS_HEADER = "x-llm-d-inference-fairness-id", "x-kvrouter-class"
CLASSES = {"light": "interactive", "flood": "batch"}
SETUPS = {
    "no queue": [],
    "fair": ["--router-queue-policy", "fair"],
}
WARM_UP = 5  # seconds of flood before the light tenant begins


@dataclass
class Phase:
    """What the clients of one tenant saw in one phase."""

    setup: str
    tenant: str
    answers: list
    seconds: float
    hits: float  # tokens of all prompts of the phase
    queries: float

    def row(self):
        good = [a for a in self.answers if not a.error]
        times = sorted(1000 * a.first_chunk for a in good) or [0.0]
        return [
            self.setup, self.tenant, str(len(good)), f"{len(good) / self.seconds:.2f}", f"{statistics.mean(times):.0f}",
            f"{percentile(times, 50):.0f}", f"{percentile(times, 99):.0f}", f"{sum(a.prompt for a in good)}",
            f"{self.hits / self.queries:.3f}" if self.queries else "n/a", str(len(self.answers) - len(good)),
        ]  # fmt: skip


LABELS = ["setup", "tenant", "answers", "per second", "TTFT mean, ms", "p50", "p99", "prompt tokens", "hit rate", "errors"]


class Clients:
    """Clients of one tenant, each of which sends chats one after the other."""

    def __init__(self, name, count, pause, url, model, args):
        self.name, self.pause, self.url, self.model, self.args = name, pause, url, model, args
        self.answers, self.lock, self.over = [], threading.Lock(), threading.Event()
        self.headers = {TENANT_HEADER: name, **({CLASS_HEADER: CLASSES[name]} if args.classes else {})}
        rng = random.Random(f"{args.seed} {name}")
        self.systems = [make_prose(rng, args.words) for _ in range(args.prompts)]
        self.threads = [threading.Thread(target=self.run, args=(i,), daemon=True) for i in range(count)]
        for thread in self.threads:
            thread.start()

    def run(self, number):
        rng = random.Random(f"{self.args.seed} {self.name} {number}")
        while not self.over.is_set():
            messages = [
                {"role": "system", "content": rng.choice(self.systems)},
                {"role": "user", "content": make_prose(rng, self.args.question_words)},
            ]
            answer = chat(self.url, self.model, messages, self.args.max_tokens, self.headers)
            with self.lock:
                self.answers.append(answer)
            if answer.error and not self.over.is_set():
                time.sleep(1)  # a refusal must not become a busy loop
            self.over.wait(self.pause * rng.uniform(0.5, 1.5))

    def take(self):
        """The answers since the last call."""
        with self.lock:
            taken, self.answers = self.answers, []
        return taken

    def stop(self):
        self.over.set()
        for thread in self.threads:
            thread.join()


def measure(setup, router, args):
    """Phases of a setup: the light tenant alone, then beside the flood."""
    model = first_model(router.http)["id"]

    def phase(name, beside=()):
        """The light tenant for a phase. Its chats count that began in it, of others those that ended in it."""
        light = Clients("light", args.light, args.pause, router.http, model, args)
        for c in beside:
            c.take()
        before, began = all_counters(router.workers, args.engine), time.monotonic()
        time.sleep(args.seconds)
        others, seconds = [c.take() for c in beside], time.monotonic() - began
        after = all_counters(router.workers, args.engine)
        light.stop()
        answers = zip((name, *(c.name for c in beside)), (light.take(), *others))
        return [Phase(setup, tenant, of, seconds, after[0] - before[0], after[1] - before[1]) for tenant, of in answers]

    print(f"{setup}: the light tenant alone", flush=True)
    phases = phase("light, alone")
    print(f"{setup}: beside the flood", flush=True)
    flood = Clients("flood", args.flood, 0, router.http, model, args)
    time.sleep(WARM_UP)
    phases += phase("light", [flood])
    flood.stop()
    return phases


def print_ratios(phases):
    """Per setup, the light tenant's p99 beside the flood by that alone."""
    for alone, beside in zip(phases[::3], phases[1::3]):
        times = [sorted(a.first_chunk for a in p.answers if not a.error) for p in (alone, beside)]
        if all(times):
            p99 = [percentile(t, 99) for t in times]
            print(f"{alone.setup}: the light tenant's p99 beside the flood is {p99[1] / p99[0]:.2f} times that alone")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="vllm", choices=("vllm", "sglang", "mocker"), help="engine of the workers (default %(default)s)")
    parser.add_argument("--binary", default="", metavar="FILE", help="path of a kvrouter binary (default: build it)")
    parser.add_argument("--model", default="", metavar="DIR", help="model for kvrouter (default: kvrouter's default)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="number of workers (default %(default)s)")
    parser.add_argument("--blocks", type=int, default=200, metavar="N", help="KV blocks of 64 tokens per worker (default %(default)s)")
    parser.add_argument("--together", type=int, default=8, metavar="N", help="requests that a worker runs at once (default %(default)s)")
    parser.add_argument("--flood", type=int, default=32, metavar="N", help="clients of the flood (default %(default)s)")
    parser.add_argument("--light", type=int, default=2, metavar="N", help="clients of the light tenant (default %(default)s)")
    parser.add_argument("--classes", action="store_true", help="give the tenants classes: interactive and batch")
    parser.add_argument("--pause", type=float, default=2, metavar="S", help="mean pause between chats of a light client, seconds (default %(default)g)")
    parser.add_argument("--seconds", type=float, default=120, metavar="S", help="length of each phase, seconds (default %(default)g)")
    parser.add_argument("--prompts", type=int, default=4, metavar="N", help="system prompts of each tenant (default %(default)s)")
    parser.add_argument("--words", type=int, default=200, metavar="N", help="words per system prompt (default %(default)s)")
    parser.add_argument("--question-words", type=int, default=60, metavar="N", help="words per question (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=32, metavar="N", help="output length, tokens (default %(default)s)")
    parser.add_argument("--seed", type=int, default=42, metavar="N", help="seed of prompts and router (default %(default)s)")
    parser.add_argument("--startup-timeout", type=float, default=300, metavar="S", help="maximum start time of router and workers, seconds (default %(default)g)")
    parser.add_argument("router_args", nargs="*", metavar="-- FLAG", help="additional flags of kvrouter")
    args = parser.parse_args()
    bench_real.at_least_one(parser, args, "workers", "blocks", "together", "flood", "light", "prompts", "words", "question_words", "max_tokens")
    if args.seconds <= 0 or args.pause < 0:
        parser.error("--seconds must be above 0, and --pause at least 0")
    args.shared, args.offload_gib = True, 0
    args.engine_args = ["--max-num-seqs", str(args.together)]
    return args


def main():
    args = parse_arguments()
    out = ROOT / "out" / "bench-fair"
    out.mkdir(parents=True, exist_ok=True)
    binary = Path(args.binary).resolve() if args.binary else bench_real.build_router(out)
    print(f"{args.flood} clients of a flood beside {args.light} light ones over {args.workers} workers that run {args.together} requests at once, "
          f"{args.seconds:g} s a phase, seed {args.seed}", flush=True)  # fmt: skip
    phases = []
    owner = Router(binary, ["--policy", "round-robin"], args, out / "workers.log")
    if args.engine == "mocker":
        owner.command += ["--mock", f"max-num-seqs={args.together}"]
    if args.engine == "sglang":
        owner.command += ["--max-running-requests", str(args.together)]
    try:
        with owner:
            for setup, flags in SETUPS.items():
                owner.empty_caches()
                with Router(binary, ["--policy", "work", *flags], args, out / f"{setup.replace(' ', '-')}.log", owner.worker_flags()) as router:
                    phases += measure(setup, router, args)
                    (out / f"tenants-{setup.replace(' ', '-')}.json").write_text(json.dumps(json.loads(get(router.control + "/tenants")[1]), indent=1))
    finally:  # report the measurements before the failure too
        if phases:
            print()
            print_rows([LABELS, *(p.row() for p in phases)])
            print_ratios(phases)
            for error in sorted({a.error for p in phases for a in p.answers if a.error})[:5]:
                print(f"bench-fair: {error}", file=sys.stderr)
    return 1 if any(a.error for p in phases for a in p.answers) else 0


if __name__ == "__main__":
    bench_real.run(main, "bench-fair")
