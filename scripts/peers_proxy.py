"""Compares the proxy path with vllm-router.

Both routers use the same four engines, which answer 32 SSE chunks at once. Runs
alternate between the routers; the table contains medians of the runs. CPU is the CPU
time of the router's processes per request. The baseline is a minimal Go proxy: round
robin without parsing the request. Added time to first token is the median through
the router minus the median without a router, in the same run. With --before, a
second kvrouter is measured in the same runs. After each run
kvrouter's index and predictions are compared with the engines' actual caches.
Started by peers.sh.
"""

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request

import peers_common as peers

CORPORA = {"hot": "64 hot prompts", "cold": "all cold", "shared": "one shared prefix"}
CHECKED = 64  # requests of each run whose decisions are checked
ENGINES = 4


def get(url):
    with urllib.request.urlopen(url, timeout=5) as answer:
        return json.load(answer)


class Load:
    """The load generator, a separate process."""

    def __init__(self, process, engines):
        self.process, self.engines = process, engines

    def ask(self, task):
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line.startswith("{"):
            sys.exit(f"peers_proxy: the load generator said {line!r}")
        return json.loads(line)

    def settled(self):
        """Waits until the engines have published all cached blocks; returns the number of blocks of each."""
        return [peers.wait_for("an engine's events", 30, lambda: get(url + "/peers_blocks"), 0.1)[0] for url in self.engines]

    def generate(self, task, pid=None):
        """Sends one load; returns the measurements."""
        self.ask(task)  # the warm-up
        self.settled()
        before = peers.cpu_seconds(pid) if pid else 0
        measured = self.ask({})
        if measured["failed"]:
            sys.exit(f"peers_proxy: {measured['failed']} requests failed at {task['URLs']} (out/peers_proxy.log)")
        if pid:
            measured["cpu_ms"] = (peers.cpu_seconds(pid) - before) / task["Requests"] * 1000
            measured["mb"] = peers.resident_bytes(pid) / 1e6
        return measured


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kvrouter", required=True)
    parser.add_argument("--test-binary", required=True, help="kvrouter's test binary, with the engines and the load generator")
    parser.add_argument("--vllm-router", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--before", help="another kvrouter, to which the first one is compared")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--corpora", default=",".join(CORPORA))
    parser.add_argument("--concurrency", default="1,32")
    options = parser.parse_args()
    peers.give_up_after(900)

    ports = peers.free_ports(ENGINES + 7)
    engines = [f"http://127.0.0.1:{p}" for p in ports[:ENGINES]]
    own, own_router, theirs, their_metrics, bare, old, old_router = ports[ENGINES:]
    log = open("out/peers_proxy.log", "w")
    started = []

    def start(*command, stdout=log, **more):
        started.append(subprocess.Popen(command, stdout=stdout, stderr=log, **more))
        return started[-1]

    def serve(program, port, router_port):
        return start(program, "--engine", "none", "--model", options.model, "--served-model-name", "m", "--http-port", str(port),
                     "--router-port", str(router_port), *(a for i, url in enumerate(engines) for a in ("--worker", f"url={url},id={i}")))

    try:
        start(options.test_binary, "-test.run", "^TestPeersBackends$", "-test.timeout", "0", stdin=subprocess.PIPE,
              env=dict(os.environ, KVROUTER_PEERS_BACKENDS=",".join(map(str, ports[:ENGINES]))))
        for url in engines:
            peers.wait_for("an engine", 30, lambda: peers.answers(url + "/health"))
        kvrouter = serve(options.kvrouter, own, own_router)
        vllm_router = start(options.vllm_router, "--host", "127.0.0.1", "--port", str(theirs), "--prometheus-port", str(their_metrics),
                            "--policy", "cache_aware", "--log-level", "warning", "--worker-urls", *engines)
        least = start(options.test_binary, "-test.run", "^TestPeersBare$", "-test.timeout", "0", stdin=subprocess.PIPE,
                      env=dict(os.environ, KVROUTER_PEERS_BARE=",".join(map(str, [bare, *ports[:ENGINES]]))))
        routers = {"kvrouter": (kvrouter.pid, f"http://127.0.0.1:{own}"), "vllm-router": (vllm_router.pid, f"http://127.0.0.1:{theirs}"),
                   "bare": (least.pid, f"http://127.0.0.1:{bare}")}
        if options.before:
            routers["before"] = (serve(options.before, old, old_router).pid, f"http://127.0.0.1:{old}")
        for name in routers.keys() & {"kvrouter", "before"}:
            peers.wait_for(name, 30, lambda: peers.answers(routers[name][1] + "/ready"))
        peers.wait_for("vllm-router", 60, lambda: peers.answers(routers["vllm-router"][1] + "/health"))
        peers.wait_for("the bare proxy", 30, lambda: peers.answers(routers["bare"][1] + "/health"))
        load = Load(start(options.test_binary, "-test.run", "^TestPeersLoad$", "-test.timeout", "0", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True, env=dict(os.environ, KVROUTER_PEERS_LOAD="1")), engines)
        index = f"http://127.0.0.1:{own_router}/workers"
        rows, wrong, checked, seeds = {}, [], 0, itertools.count(1)
        settings = list(itertools.product(options.corpora.split(","), map(int, options.concurrency.split(","))))
        for run in range(options.runs):
            for setting in settings:
                corpus, concurrency = setting
                task = {"Corpus": corpus, "Concurrency": concurrency, "Requests": options.requests, "Warm": 256 if corpus == "hot" else 64}
                direct = load.generate(dict(task, Seed=next(seeds), URLs=engines))
                for name in list(routers)[:: 1 if run % 2 == 0 else -1]:
                    pid, url = routers[name]
                    task.update(Seed=next(seeds), URLs=[url])
                    m = load.generate(task, pid)
                    m["added_ms"] = m["ttft_ms"] - direct["ttft_ms"]
                    rows.setdefault(setting, {}).setdefault(name, []).append(m)
                    if name == "kvrouter":
                        true = load.settled()
                        held = []
                        end = time.monotonic() + 10
                        while held != true and time.monotonic() < end:  # the last events are on their way
                            held = [w["blocks"] for w in sorted(get(index), key=lambda w: w["worker_id"])]
                        if held != true:
                            wrong.append(f"the index holds {held} blocks, the engines {true}")
                        answer = load.ask(dict(task, Check=CHECKED))
                        checked += CHECKED
                        wrong += answer["wrong"]
                        if not answer["overlap"]:
                            wrong.append(f"nothing was found cached of {corpus}")
            print(f"peers: proxy run {run + 1} of {options.runs} done", file=sys.stderr)
        with urllib.request.urlopen(routers["kvrouter"][1] + "/metrics") as page:
            metrics = page.read().decode()
    finally:
        peers.end_all(started)

    def counted(name):
        return {labels: float(value) for labels, value in re.findall(rf"^kvrouter_{name}{{(.*)}} (\S+)$", metrics, re.M) if float(value)}

    predictions = counted("predictions_total")
    if sum(predictions.values()) != checked or not all('result="exact"' in labels for labels in predictions):
        wrong.append(f"of {checked} predictions {predictions}")
    if mismatches := counted("prompt_tokens_mismatch_total"):
        wrong.append(f"prompts of another length than the engine's: {mismatches}")
    report(rows, wrong, checked, options)


def compare(rows):
    """Prints the median ratios to the older kvrouter, of the pairs of runs."""
    lines = []
    for (corpus, concurrency), by in rows.items():
        ratios = [f"{statistics.median(now[key] / before[key] for now, before in zip(by['kvrouter'], by['before'])):.3f}" for key in ("cpu_ms", "ttft_ms", "mb")]
        lines.append([CORPORA[corpus], concurrency, *ratios])
    peers.table(["prompts", "concurrency", "CPU a request, now / before", "first token", "resident"], lines)
    print()


def report(rows, wrong, checked, options):
    print(f"Proxy path: {ENGINES} engines answering 32 SSE chunks at once, 1,500-word prompts, medians of {options.runs} alternating runs of {options.requests} requests\n")
    medians = {setting: {name: {key: statistics.median(m[key] for m in runs) for key in ("cpu_ms", "added_ms", "mb")} for name, runs in by.items()}
               for setting, by in rows.items()}
    if options.before:
        compare(rows)
    head = ["prompts", "concurrency", "CPU a request, ms", "vllm-router", "ratio", "a bare proxy in Go", "its ratio", "added time to first token, ms", "vllm-router", "resident, MB", "vllm-router"]
    lines = []
    for (corpus, concurrency), by in medians.items():
        ours, theirs, least = by["kvrouter"], by["vllm-router"], by["bare"]
        lines.append([CORPORA[corpus], concurrency, f"{ours['cpu_ms']:.2f}", f"{theirs['cpu_ms']:.2f}", f"{ours['cpu_ms'] / theirs['cpu_ms']:.2f}",
                      f"{least['cpu_ms']:.2f}", f"{least['cpu_ms'] / theirs['cpu_ms']:.2f}",
                      f"{ours['added_ms']:.2f}", f"{theirs['added_ms']:.2f}", f"{ours['mb']:.0f}", f"{theirs['mb']:.0f}"])
    peers.table(head, lines)

    checks = peers.Checks("proxy")
    for (corpus, concurrency), by in medians.items():
        ours, theirs = by["kvrouter"], by["vllm-router"]
        if limit := {"hot": 1, "cold": 3}.get(corpus):
            ratio = ours["cpu_ms"] / theirs["cpu_ms"]
            checks.hold(ratio <= limit, f"{CORPORA[corpus]}, concurrency {concurrency}: {ratio:.2f} times vllm-router's CPU a request (want {limit})")
        if (corpus, concurrency) == ("hot", 1):
            checks.hold(ours["added_ms"] <= theirs["added_ms"], f"hot prompts add {ours['added_ms']:.2f} ms to the first token, with vllm-router {theirs['added_ms']:.2f} ms")
    more = max(by["kvrouter"]["mb"] - by["vllm-router"]["mb"] for by in medians.values())
    checks.hold(more <= 0, f"resident memory {-more:.0f} MB below vllm-router's or more" if more <= 0 else f"{more:.0f} MB more than vllm-router resident")
    checks.hold(not wrong, f"{checked} decisions equal what the engines had cached, and so do the index and the prompts' lengths"
                if not wrong else f"{len(wrong)} things wrong with {checked} decisions, such as: {wrong[0]}")
    checks.end()


if __name__ == "__main__":
    main()
