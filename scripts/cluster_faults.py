#!/usr/bin/env python3
"""Runs five kvrouters of one cluster under load, each in a network namespace of its own, and breaks what is between them:

  partition   three routers are cut off from two for a minute, without any error: packets vanish
  kill        a router is killed (SIGKILL) and started again
  nats        the cluster's NATS, one server of an operator, is killed for a minute and started again

Each router serves completions and reservations all the time, by clients of its own. Afterwards the reservations that
are in flight must be the same at all routers within 5 seconds.

  scripts/cluster_faults.py                     all three: about 5 minutes
  scripts/cluster_faults.py --long 10 kill      one, with faults of 10 seconds

Needs root (network namespaces) and out/kvrouter; `nats` also needs out/nats-server: `make test-cluster` builds both.
Only Python's standard library is needed. The exit code is 0 if no request failed and the books were equal in time.
"""

from __future__ import annotations

import argparse
import ctypes
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROUTERS, AWAY, WORKERS = range(1, 6), (4, 5), range(1, 4)
LIMIT = 5  # seconds until the books are equal
KEY = "0123456789abcdef"


def space(of) -> str:
    """The namespace of a router, or that of workers, clients and the networks, "hub"."""
    return f"kvr{os.getpid()}-{of}"


def sh(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class Worker(BaseHTTPRequestHandler):
    """An engine that answers completions after a while."""

    protocol_version = "HTTP/1.1"

    def answer(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        body = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
        if self.command == "POST":
            time.sleep(0.2)
            body = b'{"object":"text_completion","choices":[{"text":"x"}],"usage":{"prompt_tokens":40,"completion_tokens":1}}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer

    def log_message(self, *_):
        pass


class Router:
    """A kvrouter in a namespace: 10.8.N.2 towards clients and workers, 10.9.0.N towards the other routers."""

    def __init__(self, number: int, flags: list[str], logs: Path):
        self.number, self.flags, self.log = number, flags, open(logs / f"router{number}.log", "wb")
        self.name = space(number)
        sh("ip", "netns", "add", self.name)
        for side, address in (("m", f"10.9.0.{number}/24"), ("c", f"10.8.{number}.2/24")):
            sh("ip", "-n", space("hub"), "link", "add", f"{side}{number}", "type", "veth", "peer", "name", side, "netns", self.name)
            sh("ip", "-n", space("hub"), "link", "set", "dev", f"{side}{number}", "up")
            sh("ip", "-n", self.name, "addr", "add", address, "dev", side)
            sh("ip", "-n", self.name, "link", "set", "dev", side, "up")
        sh("ip", "-n", self.name, "link", "set", "dev", "lo", "up")
        self.attach("whole")
        sh("ip", "-n", space("hub"), "addr", "add", f"10.8.{number}.1/24", "dev", f"c{number}")
        self.failed, self.answered, self.held, self.process = [], 0, 0, None

    def attach(self, network: str):
        sh("ip", "-n", space("hub"), "link", "set", "dev", f"m{self.number}", "master", network)

    def start(self):
        workers = [f"--worker=url=http://10.8.{self.number}.1:{9000 + w},id={w}" for w in WORKERS]
        fixed = ["--engine", "none", "--policy", "kv", "--no-kv-events", "--block-size", "4", "--host", "0.0.0.0", "--router-host", "0.0.0.0", "--insecure"]
        command = ["ip", "netns", "exec", self.name, str(ROOT / "out/kvrouter"), *fixed, *workers, *self.flags]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)

    def ask(self, method: str, path: str, body=None, port=7000):
        connection = http.client.HTTPConnection(f"10.8.{self.number}.2", port, timeout=30)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def peers(self) -> int:
        page = self.ask("GET", "/metrics")[1].decode().splitlines()
        return next((int(float(line.split()[1])) for line in page if line.startswith("kvrouter_cluster_peers ")), -1)

    def books(self):
        loads = json.loads(self.ask("GET", "/loads")[1])[0]["loads"]
        return [(w["worker_id"], w["active_requests"], w["potential_prefill_tokens"]) for w in loads]

    def serve(self, load: Load, client: int):
        """Sends completions and reservations until the load ends or this router is to be killed."""
        made, held = 0, []
        while load.goes(self):
            made += 1
            prompt = [(made * 7 + i) % 1000 for i in range(40)]
            name = f"{self.number}-{client}-{made}"
            try:
                if made % 2:
                    self.note(self.ask("POST", "/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 1}, port=8000))
                    continue
                self.note(self.ask("POST", "/select_and_reserve", {"model_name": "m", "selection_id": name, "token_ids": prompt}))
                held.append(name)
                if len(held) > 10:
                    self.note(self.ask("DELETE", "/reservations/" + held.pop(0)))
            except (OSError, http.client.HTTPException) as error:
                self.failed.append(repr(error))
        self.held += len(held)

    def note(self, answer):
        if answer[0] != 200:
            self.failed.append(f"{answer[0]} {answer[1][:200]!r}")
        self.answered += 1


class Load:
    """Three clients of each router."""

    def __init__(self, routers):
        self.ended, self.paused = False, None
        self.clients = [(r, threading.Thread(target=r.serve, args=(self, c))) for r in routers for c in range(3)]
        for _, client in self.clients:
            client.start()

    def goes(self, router) -> bool:
        return not self.ended and self.paused is not router

    def pause(self, router):
        self.paused = router
        for _, client in (c for c in self.clients if c[0] is router):
            client.join()

    def end(self):
        self.ended = True
        for _, client in self.clients:
            client.join()


def wait(what: str, limit: float, condition) -> float:
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > limit:
            raise TimeoutError(f"not within {limit} s: {what}")
        time.sleep(0.05)
    return time.monotonic() - began


def equal(routers) -> bool:
    books = [r.books() for r in routers]
    return all(b == books[0] for b in books)


def run(scenario: str, long: float, logs: Path) -> bool:
    logs.mkdir(parents=True, exist_ok=True)
    embedded = ["--cluster", "faults", "--cluster-key", KEY, "--cluster-peers", "10.9.0.1:6222"]
    flags = ["--cluster", "nats://10.9.0.100:4222"] if scenario == "nats" else embedded
    routers, server = [], None
    nats = ["ip", "netns", "exec", space("hub"), str(ROOT / "out/nats-server"), "-a", "10.9.0.100", "-p", "4222"]
    try:
        sh("ip", "netns", "add", space("hub"))
        sh("ip", "-n", space("hub"), "link", "set", "dev", "lo", "up")
        for network in ("whole", "apart"):
            sh("ip", "-n", space("hub"), "link", "add", network, "type", "bridge")
            sh("ip", "-n", space("hub"), "link", "set", "dev", network, "up")
        sh("ip", "-n", space("hub"), "addr", "add", "10.9.0.100/24", "dev", "whole")
        namespace = os.open(f"/run/netns/{space('hub')}", os.O_RDONLY)
        if ctypes.CDLL(None).setns(namespace, 0):
            raise PermissionError("setns failed: run as root")
        os.close(namespace)
        engines = [ThreadingHTTPServer(("0.0.0.0", 9000 + w), Worker) for w in WORKERS]
        for engine in engines:
            engine.handle_error = lambda *_: None  # routers that end close their connections
            threading.Thread(target=engine.serve_forever, daemon=True).start()
        if scenario == "nats":
            server = subprocess.Popen(nats, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        routers = [Router(n, flags, logs) for n in ROUTERS]
        for r in routers:
            r.start()
        up = lambda: all(r.ask("GET", "/ready", port=8000)[0] == 200 and r.peers() == len(ROUTERS) - 1 for r in routers)
        wait("all routers hear all others", 60, lambda: quiet(up))
        load = Load(routers)
        time.sleep(5)
        began = time.monotonic()
        if scenario == "partition":
            for r in routers:
                if r.number in AWAY:
                    r.attach("apart")
            want = [len(AWAY) - 1 if r.number in AWAY else len(ROUTERS) - len(AWAY) - 1 for r in routers]
            noticed = wait("the split is seen", 30, lambda: [r.peers() for r in routers] == want)
        elif scenario == "kill":
            killed = routers[-1]
            load.pause(killed)
            killed.process.send_signal(signal.SIGKILL)  # ip netns exec becomes the router
            killed.process.wait()
            noticed = wait("the killed router is missed", 30, lambda: all(r.peers() == len(ROUTERS) - 2 for r in routers[:-1]))
        else:
            server.kill()
            server.wait()
            noticed = wait("nobody hears anybody", 30, lambda: all(r.peers() == 0 for r in routers))
        time.sleep(max(0, long - (time.monotonic() - began)))
        if scenario == "partition":
            for r in routers:
                r.attach("whole")
        elif scenario == "kill":
            killed.held = 0
            killed.start()
        else:
            server = subprocess.Popen(nats, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        mended = time.monotonic()
        wait("all routers hear all others again", 60, lambda: quiet(up))
        heard = time.monotonic() - mended
        load.end()
        took = wait("the books are equal", 60, lambda: equal(routers))
        books, failed = sum(w[1] for w in routers[0].books()), [f for r in routers for f in r.failed]
        held = sum(r.held for r in routers)
        print(f"{scenario}: {long:g} s; noticed after {noticed:.1f} s; all heard {heard:.1f} s after mending; books equal {took:.1f} s after the load ended, "
              f"{books} of {held} reservations; {len(failed)} of {sum(r.answered for r in routers)} requests failed", *failed[:3], flush=True)  # fmt: skip
        return not failed and took <= LIMIT and books == held
    finally:
        for p in [r.process for r in routers if r.process] + ([server] if server else []):
            p.terminate()
            try:
                p.wait(30)
            except subprocess.TimeoutExpired:
                p.kill()
        for of in [*ROUTERS, "hub"]:
            subprocess.run(["ip", "netns", "del", space(of)], capture_output=True, check=False)


def quiet(condition) -> bool:
    """Whether a condition holds; a router that does not answer yet fulfils none."""
    try:
        return condition()
    except (OSError, http.client.HTTPException):
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="partition, kill, nats (default: all)")
    parser.add_argument("--long", type=float, default=60, metavar="S", help="length of a fault, seconds (default %(default)g)")
    args = parser.parse_args()
    known = ["partition", "kill", "nats"]
    for scenario in args.scenarios:
        if scenario not in known:
            parser.error(f"unknown scenario {scenario}: want {', '.join(known)}")
    if os.geteuid() != 0:
        parser.error("network namespaces need root")
    results = []
    for scenario in args.scenarios or known:
        child = os.fork()  # which enters the namespace
        if child == 0:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
            try:
                os._exit(0 if run(scenario, args.long, ROOT / "out/cluster-faults" / scenario) else 1)
            except (Exception, SystemExit) as error:  # noqa: BLE001
                print(f"{scenario}: {error!r}; logs in out/cluster-faults/{scenario}", flush=True)
                os._exit(1)
        signal.signal(signal.SIGTERM, lambda *_, child=child: os.kill(child, signal.SIGTERM))
        results.append(os.waitpid(child, 0)[1])
    sys.exit(any(results))


if __name__ == "__main__":
    main()
