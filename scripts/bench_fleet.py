#!/usr/bin/env python3
"""Compares routers by the share of prompt tokens that simulated workers find in their caches, each router started with
the command that its README shows. The workers have blocks of 16 tokens, and KV events or none.

The load is closed: conversations over a few system prompts take turns, and every turn repeats the previous messages with
their answers. A first run on one worker with room for everything gives the bound, and what the caches need: a cache of
1 holds a worker's part of the conversations, each with a copy of its system prompt. No cache is smaller than the
longest request. Every run starts its workers and its router anew. CPU time is that of the router's process.

  scripts/peers.sh fleet                                        the whole grid, with peers (make bench-fleet)
  scripts/bench_fleet.py --workers 4,8 --cache 2 --events none --seeds 1 --routers kvrouter,SMG
  scripts/bench_fleet.py --router 'kvrouter={kvrouter} [{url}] --http-port {port} --router-port {port2}'

Placeholders of --router: {kvrouter} {vllm_router} {smg} {model} {port} {port2}, and within brackets, which are repeated
for each worker, {url} {events} {replay}. It replaces the router of that name, or adds one. The first router is compared
with the others. Runs go to out/fleet.csv, the means over the seeds to stdout.
"""

import argparse
import csv
import itertools
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import bench_real
import peers_common as peers

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrouter"
OUT = bench_real.ROOT / "out"
BLOCK_SIZE = 16  # tokens; vLLM's default on a GPU
DECODE_MS = "6,0,0"  # the default grows with the used share of the cache, which is small here

KVROUTER = "{kvrouter} [{url}] --http-port {port} --router-port {port2}"
PEER = "--host 127.0.0.1 --port {port} --prometheus-port {port2} --worker-urls [{url}]"
ROUTERS = {
    "kvrouter": KVROUTER,
    "round robin": KVROUTER + " --policy round-robin",
    "vllm-router": "{vllm_router} --policy cache_aware " + PEER,
    "SMG": "{smg} launch --policy cache_aware " + PEER,
}
# What is wanted, in times of the best other router's: the means of the time to the first token and of the whole run, in
# which requests follow each other, and with one request in flight hits, by the workers' KV events. With more, a worker that
# is idle can answer before the one that has the prompt. Hits differ by 0.005 between runs where caches suffice, times by
# 0.03.
LEAST = {"none": 0.99, "all": 0.995}
MOST = {"ttft_ms": ("first tokens", 1.05), "seconds": ("all answers", 1.02)}
KINDS = list(LEAST)
# Columns of out/fleet.csv. exact counts predictions that equal the cached tokens, high those that are higher; only kvrouter
# reports its own.
FIELDS = [
    "workers", "cache", "blocks", "events", "seed", "router", "share", "ttft_ms", "cpu_ms", "requests", "errors", "predicted", "exact", "high",
    "seconds",
]  # fmt: skip


class Fleet:
    """N simulated workers in one process, and ports for a router. Leaving `with` ends both."""

    def __init__(self, options, workers, blocks, events):
        self.options, self.workers = options, workers
        base = bench_real.free_ports(4 * workers + 4)
        http, kv_events, replay, loads = (base + i * workers for i in range(4))
        own, own_router, self.port, self.port2 = range(base + 4 * workers, base + 4 * workers + 4)
        local = "http://127.0.0.1:{}".format
        self.url, self.urls = local(self.port), [local(http + i) for i in range(workers)]
        self.endpoints = [{"url": url, "events": f"tcp://127.0.0.1:{kv_events + i}", "replay": f"tcp://127.0.0.1:{replay + i}"}
                          for i, url in enumerate(self.urls)]  # fmt: skip
        self.own = local(own)
        self.command = [
            options.kvrouter, "--engine", "mocker", "--num-workers", workers, "--model", options.model, "--block-size", BLOCK_SIZE,
            "--mock", f"num-gpu-blocks={blocks},decode-ms={DECODE_MS}", "--speedup-ratio", options.speed,
            *([] if events else ["--no-kv-events"]),
            "--base-worker-port", http, "--base-kv-events-port", kv_events, "--base-kv-replay-port", replay,
            "--base-metrics-port", loads, "--http-port", own, "--router-port", own_router, *options.worker_args,
        ]  # fmt: skip

    def __enter__(self):
        self.log = open(OUT / "fleet.log", "w")
        self.started = []
        try:
            self.start(self.command)
            self.wait(self.own)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for process in reversed(self.started):
            process.kill()  # draining would take 5 s
            process.wait()
        self.log.close()

    def start(self, command):
        process = subprocess.Popen(list(map(str, command)), stdout=self.log, stderr=self.log)
        self.started.append(process)
        return process

    def route(self, template):
        """Starts the router of a template; returns its process when it knows all workers."""
        values = vars(self.options) | {"port": self.port, "port2": self.port2}
        repeated = re.sub(r"\[(.*?)\]", lambda part: " ".join(part[1].format(**(values | e)) for e in self.endpoints), template)
        process = self.start(shlex.split(repeated.format(**values)))
        self.wait(self.url)
        return process

    def wait(self, url):
        process = self.started[-1]

        def ready():
            if process.poll() is not None:
                sys.exit(f"bench-fleet: {process.args[0]} ended with code {process.returncode} ({OUT / 'fleet.log'})")
            return known_workers(url) == self.workers

        peers.wait_for(f"{process.args[0]} and {self.workers} workers", 60, ready, 0.02)


def known_workers(url):
    """How many workers a router has that take requests."""
    for path, field in (("/readiness", "healthy_workers"), ("/ready", "schedulable_workers")):  # vllm-router forwards the second
        status, text = bench_real.get(url + path)
        if status == 200:
            return json.loads(text)[field]
    return 0


def serve(options, turns, workers, blocks, events, template=""):
    """Sends a load through a router, or to the only worker without one; returns the answers, CPU time and seconds."""
    with Fleet(options, workers, blocks, events) as fleet:
        router = fleet.route(template) if template else None
        before = router and peers.cpu_seconds(router.pid)
        model = bench_real.first_model(fleet.urls[0])["id"]
        answers, seconds = bench_real.run_load([fleet.url if router else fleet.urls[0]], model, turns, options, hints=lambda *_: {})
        return answers, peers.cpu_seconds(router.pid) - before if router else 0, seconds


def share(answers):
    """The share of the prompt tokens that was found cached."""
    return sum(a.cached for a in answers) / max(1, sum(a.prompt for a in answers))


class Load:
    """The conversations of a seed, and what they need."""

    def __init__(self, options, seed):
        options.seed = seed
        self.turns = bench_real.make_load(options)
        answers, _, _ = serve(options, self.turns, 1, 16384, False)
        if errors := [a.error for a in answers if a.error]:
            sys.exit(f"bench-fleet: a worker alone answers {errors[0]} ({OUT / 'fleet.log'})")
        self.bound = share(answers)
        self.shortest = min(a.prompt for a in answers)
        whole = {}  # conversation: tokens with its last answer
        for turn, answer in zip(self.turns[1], answers):
            whole[turn.conversation] = max(whole.get(turn.conversation, 0), answer.prompt + options.max_tokens)
        self.longest, self.mean = max(whole.values()), statistics.mean(whole.values())

    def blocks(self, options, workers, cache):
        need = cache * math.ceil(options.conversations / workers) * self.mean
        return math.ceil(max(need, self.longest + BLOCK_SIZE) / BLOCK_SIZE)


def measure_all(options, loads, write):
    """Calls write for every run."""
    settings = itertools.product(options.events, options.workers, options.cache, loads.items())
    for number, (events, workers, cache, (seed, of)) in enumerate(settings):
        blocks = of.blocks(options, workers, cache)
        for name in list(options.routers)[:: -1 if number % 2 else 1]:
            answers, cpu, seconds = serve(options, of.turns, workers, blocks, events == "all", options.routers[name])
            errors = [a.error for a in answers if a.error]
            for error in sorted(set(errors))[:3]:
                print(f"bench-fleet: {name}, {workers} workers: {error}", file=sys.stderr)
            predicted = [a for a in answers if a.predicted is not None]
            write({
                "workers": workers, "cache": cache, "blocks": blocks, "events": events, "seed": seed, "router": name,
                "share": round(share(answers), 4), "ttft_ms": round(1000 * statistics.mean(a.first_chunk for a in answers), 2),
                "cpu_ms": round(1000 * cpu / len(answers), 3), "requests": len(answers),
                "errors": len(errors), "predicted": len(predicted), "exact": sum(a.predicted == a.cached for a in predicted),
                "high": sum(a.predicted > a.cached for a in predicted),
                "seconds": round(seconds, 2),
            })  # fmt: skip


def report(options, loads, runs):
    """Prints the means over the seeds."""
    of = list(loads.values())
    first, *others = options.routers
    print(f"{options.conversations} conversations of {options.turns} turns over {options.prompts} system prompts, prompts of "
          f"{min(o.shortest for o in of)} to {max(o.longest for o in of) - options.max_tokens} tokens, {options.concurrency} in flight, "
          f"means of {len(of)} seeds. At most {statistics.mean(o.bound for o in of):.3f} can be found.\n")  # fmt: skip
    rows, worst, longest, errors = [], {}, dict.fromkeys(MOST, 0), sum(r["errors"] for r in runs)
    for setting in itertools.product(options.events, options.workers, options.cache):
        these = [r for r in runs if (r["events"], r["workers"], r["cache"]) == setting]
        mean = {name: {key: statistics.mean(r[key] for r in these if r["router"] == name)
                       for key in ("share", "ttft_ms", "cpu_ms", "seconds", "blocks")}
                for name in options.routers}  # fmt: skip
        ratio = mean[first]["share"] / max(1e-9, *(mean[o]["share"] for o in others)) if others else 1
        worst[setting[0]] = min(ratio, worst.get(setting[0], ratio))
        for key in longest if others else ():
            longest[key] = max(longest[key], mean[first][key] / min(mean[o][key] for o in others))
        columns = [" / ".join(f"{m[key]:.{digits}f}" for m in mean.values()) for key, digits in (("ttft_ms", 1), ("seconds", 1), ("cpu_ms", 2))]
        rows.append([*setting, f"{mean[first]['blocks']:.0f}", *(f"{m['share']:.3f}" for m in mean.values()), f"{ratio:.2f}", *columns])
    peers.table(["events", "workers", "cache", "blocks", *options.routers, f"{first} / best other", "TTFT, ms", "run, s", "CPU a request, ms"], rows)
    checks = peers.Checks("fleet")
    checks.hold(not errors, f"{errors} of {sum(r['requests'] for r in runs)} requests failed")
    for events, ratio in worst.items() if others and options.concurrency == 1 else ():
        least = LEAST[events]
        checks.hold(ratio >= least, f"events {events}: {first} finds {ratio:.3f} of the best other's hits, or more (want {least})")
    for key, (what, most) in MOST.items() if others else ():
        checks.hold(longest[key] <= most, f"{first} has {what} after {longest[key]:.2f} times the best other's time, or less (want {most})")
    checks.end()


def listed(kind, among=()):
    """A parser of comma-separated values."""

    def parse(text):
        values = [kind(value.strip()) for value in text.split(",")]
        if unknown := [v for v in values if among and v not in among]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r}: choose among {', '.join(among)}")
        return values

    return parse


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--workers", type=listed(int), default=[2, 4, 8, 16], metavar="N,N", help="default 2,4,8,16")
    add("--cache", type=listed(float), default=[0.25, 1, 2], metavar="X,X", help="caches, as a multiple of the need (default 0.25,1,2)")
    add("--events", type=listed(str, KINDS), default=KINDS, metavar=",".join(KINDS), help="KV events of the workers (default: both)")
    add("--seeds", type=int, default=3, metavar="N", help="number of seeds (default %(default)s)")
    add("--routers", type=listed(str), metavar="A,B", help="routers in their order (default: all)")
    add("--router", action="append", default=[], metavar="NAME=COMMAND", help="another command of a router, or another router")
    add("--kvrouter", default=str(OUT / "kvrouter"), metavar="FILE", help="default %(default)s")
    add("--vllm-router", default=f"{CACHE}/peers-vllm-router-0.1.17/bin/vllm-router", metavar="FILE", help="default %(default)s")
    add("--smg", default=f"{CACHE}/peers-smg-1.13.0/bin/smg", metavar="FILE", help="default %(default)s")
    add("--model", default=f"{CACHE}/smollm2-135m-instruct", metavar="FOLDER", help="model of the workers (default %(default)s)")
    add("--worker-args", type=shlex.split, default=[], metavar="ARGS", help="further flags of the workers, in one string")
    add("--speed", type=float, default=1, metavar="X", help="speed of the workers relative to a GPU (default %(default)s); with more, "
        "the routers' own time counts for more")
    for name, number, what in (
        ("prompts", 8, "system prompts"), ("words", 500, "words per system prompt"), ("conversations", 24, "conversations"),
        ("turns", 12, "turns per conversation"), ("question-words", 16, "words added to the question of each turn"),
        ("concurrency", 4, "requests in flight"), ("max-tokens", 16, "tokens per answer"),
    ):  # fmt: skip
        add(f"--{name}", type=int, default=number, metavar="N", help=f"number of {what} (default {number})")
    options = parser.parse_args()
    options.multi_turn = True
    commands = ROUTERS | dict(router.split("=", 1) for router in options.router)
    if unknown := [name for name in options.routers or () if name not in commands]:
        parser.error(f"--routers {unknown[0]}: choose among {', '.join(commands)}")
    options.routers = {name: commands[name] for name in options.routers or commands}
    for program in (p for p in ("kvrouter", "vllm_router", "smg") if "{%s}" % p in " ".join([KVROUTER, *options.routers.values()])):
        if not Path(getattr(options, program)).exists():
            parser.error(f"{getattr(options, program)}: no such file; scripts/peers.sh fleet builds and installs what is needed")
    return options


def main():
    options = parse_arguments()
    peers.give_up_after(7200)
    OUT.mkdir(exist_ok=True)
    began, runs = time.monotonic(), []
    loads = {seed: Load(options, seed) for seed in range(1, options.seeds + 1)}
    with open(OUT / "fleet.csv", "w", newline="") as file:
        table = csv.DictWriter(file, FIELDS)
        table.writeheader()

        def write(run):
            table.writerow(run)
            file.flush()
            runs.append(run)
            print("bench-fleet:", *(f"{key} {run[key]}" for key in FIELDS), file=sys.stderr)

        measure_all(options, loads, write)
    print(f"bench-fleet: {time.monotonic() - began:.0f} s", file=sys.stderr)
    report(options, loads, runs)


if __name__ == "__main__":
    main()
