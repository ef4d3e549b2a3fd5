#!/usr/bin/env python3
"""The proxy path beside vllm-router; scripts/peers_proxy.sh prepares and calls it.

Both routers stand before the same four engines that answer 32 SSE chunks at
once. Runs alternate between them; the table holds medians over the runs. CPU is
what the router's processes used (/proc/PID/stat), divided by the requests. Added
time to first token is the median through the router less the median without
one, in the same run.
"""
import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.request

TICK = os.sysconf("SC_CLK_TCK")
CORPORA = {"hot": "64 hot prompts", "cold": "all cold", "shared": "one shared prefix"}


def free_ports(n):
    held = [socket.socket() for _ in range(n)]
    for s in held:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in held]
    for s in held:
        s.close()
    return ports


def family(pid):
    """A process and all below it."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as f:
            children = f.read().split()
    except OSError:
        return []
    return [pid] + [p for c in children for p in family(int(c))]


def cpu_seconds(pid):
    total = 0
    for p in family(pid):
        with open(f"/proc/{p}/stat") as f:
            fields = f.read().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICK


def resident_mb(pid):
    total = 0
    for p in family(pid):
        with open(f"/proc/{p}/status") as f:
            total += sum(int(line.split()[1]) for line in f if line.startswith("VmRSS"))
    return total / 1024


def wait_for(what, limit, check):
    end = time.monotonic() + limit
    while True:
        try:
            if check():
                return
        except OSError:
            pass
        if time.monotonic() > end:
            sys.exit(f"peers_proxy: {what} did not come up within {limit} s")
        time.sleep(0.1)


def answers(url):
    with urllib.request.urlopen(url, timeout=2) as answer:
        return answer.status == 200


def generate(load, task, pid=None):
    """Sends one load; returns what was measured."""
    load.stdin.write(json.dumps(task) + "\n")
    load.stdin.flush()
    line = load.stdout.readline()
    if line.strip() != "ready":
        sys.exit(f"peers_proxy: the load generator said {line!r}")
    time.sleep(0.3)  # the engines' events come after their answers
    before = cpu_seconds(pid) if pid else 0
    load.stdin.write("{}\n")
    load.stdin.flush()
    measured = json.loads(load.stdout.readline())
    if pid:
        time.sleep(0.1)
        measured["cpu_ms"] = (cpu_seconds(pid) - before) / task["Requests"] * 1000
        measured["mb"] = resident_mb(pid)
    return measured


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--venv", required=True)
    arguments.add_argument("--model", required=True)
    arguments.add_argument("--runs", type=int, default=5)
    arguments.add_argument("--requests", type=int, default=1000)
    arguments.add_argument("--corpora", default="hot,cold,shared")
    arguments.add_argument("--concurrency", default="1,32")
    arguments.add_argument("--kvrouter-args", default="")
    arguments.add_argument("--json", action="store_true", help="print every measurement")
    options = arguments.parse_args()

    ports = free_ports(8)
    engines = [f"http://127.0.0.1:{p}" for p in ports[:4]]
    log = open("out/peers_proxy.log", "w")
    quiet = {"stdout": log, "stderr": log}
    started = []

    def start(*command, **more):
        process = subprocess.Popen(command, **more)
        started.append(process)
        return process

    try:
        start("out/peers.test", "-test.run", "^TestPeersBackends$", "-test.timeout", "0", stdin=subprocess.PIPE,
              env=dict(os.environ, KVROUTER_PEERS_BACKENDS=",".join(map(str, ports[:4]))), **quiet)
        for url in engines:
            wait_for("an engine", 30, lambda: answers(url + "/health"))
        ours = start("out/kvrouter", "--engine", "none", "--model", options.model, "--served-model-name", "m", "--http-port", str(ports[4]),
                     "--router-port", str(ports[5]), *options.kvrouter_args.split(),
                     *(a for i, url in enumerate(engines) for a in ("--worker", f"url={url},id={i}")), **quiet)
        theirs = start(options.venv + "/bin/vllm-router", "--host", "127.0.0.1", "--port", str(ports[6]), "--prometheus-port", str(ports[7]),
                       "--policy", "cache_aware", "--log-level", "warning", "--worker-urls", *engines, **quiet)
        routers = {"kvrouter": (ours.pid, f"http://127.0.0.1:{ports[4]}"), "vllm-router": (theirs.pid, f"http://127.0.0.1:{ports[6]}")}
        wait_for("kvrouter", 30, lambda: answers(routers["kvrouter"][1] + "/ready"))
        wait_for("vllm-router", 60, lambda: answers(routers["vllm-router"][1] + "/health"))
        time.sleep(2)
        load = start("out/peers.test", "-test.run", "^TestPeersLoad$", "-test.timeout", "0", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                     stderr=log, text=True, env=dict(os.environ, KVROUTER_PEERS_LOAD="1"))
        rows, seed = {}, 0
        for run in range(options.runs):
            for corpus in options.corpora.split(","):
                for concurrency in map(int, options.concurrency.split(",")):
                    seed += 1
                    task = {"Corpus": corpus, "Concurrency": concurrency, "Requests": options.requests,
                            "Warm": 256 if corpus == "hot" else 64, "Seed": seed}
                    direct = generate(load, dict(task, URLs=engines))
                    names = list(routers)
                    for name in names if run % 2 == 0 else names[::-1]:
                        pid, url = routers[name]
                        seed += 1
                        m = generate(load, dict(task, Seed=seed, URLs=[url]), pid)
                        m["added_ms"] = m["ttft_ms"] - direct["ttft_ms"]
                        m["direct_ms"] = direct["ttft_ms"]
                        if m["failed"]:
                            print(f"{name}, {corpus}, concurrency {concurrency}: {m['failed']} requests failed", file=sys.stderr)
                        if options.json:
                            print(json.dumps({"router": name, "corpus": corpus, "concurrency": concurrency, "run": run, **m}))
                        rows.setdefault((corpus, concurrency), {}).setdefault(name, []).append(m)
            print(f"run {run + 1} of {options.runs} done", file=sys.stderr)
        table(rows, options)
        with urllib.request.urlopen(routers["kvrouter"][1] + "/metrics") as page:
            lines = page.read().decode().splitlines()
        with open("out/peers_proxy.metrics", "w") as f:
            f.write("\n".join(lines))
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def table(rows, options):
    print(f"4 engines answering 32 SSE chunks at once, 1,500-word prompts, medians of {options.runs} alternating runs of {options.requests} requests")
    print("| prompts | concurrency | CPU a request, ms: kvrouter | vllm-router | ratio | added time to first token, ms: kvrouter | vllm-router | resident, MB: kvrouter | vllm-router |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (corpus, concurrency), by in rows.items():
        def median(name, key):
            return statistics.median(m[key] for m in by[name])
        ratio = statistics.median(a["cpu_ms"] / b["cpu_ms"] for a, b in zip(by["kvrouter"], by["vllm-router"]) if b["cpu_ms"])
        cells = [CORPORA[corpus], str(concurrency), f"{median('kvrouter', 'cpu_ms'):.2f}", f"{median('vllm-router', 'cpu_ms'):.2f}", f"{ratio:.2f}",
                 f"{median('kvrouter', 'added_ms'):.2f}", f"{median('vllm-router', 'added_ms'):.2f}",
                 f"{median('kvrouter', 'mb'):.0f}", f"{median('vllm-router', 'mb'):.0f}"]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
