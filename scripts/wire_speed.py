"""Publishes KV-event batches to two indexers in turn and compares their CPU.

Both get the same payloads, in vLLM's present form, from one pyzmq publisher as
fast as it can send. CPU is user + system time of the indexer's process between
the moment it is subscribed and the moment it holds every block; what it holds
is then counted. Started by wire_speed.sh.
"""

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request

import msgspec
import zmq

BLOCKS, BLOCK_SIZE = 8, 16
TICK = 1 / os.sysconf("SC_CLK_TCK")


def payloads(batches):
    """Batches of one store event, each a prompt of its own; and the last prompt."""
    dice = random.Random(42)
    tokens = []
    out = []
    for _ in range(batches):
        tokens = [dice.randrange(128000) for _ in range(BLOCKS * BLOCK_SIZE)]
        event = {
            "type": "BlockStored",
            "block_hashes": [dice.getrandbits(64) for _ in range(BLOCKS)],
            "parent_block_hash": None,
            "token_ids": tokens,
            "block_size": BLOCK_SIZE,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * BLOCKS,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        out.append(msgspec.msgpack.encode([time.time(), [event], 0]))
    return out, tokens


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat") as f:
        fields = f.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK


def resident_bytes(pid):
    with open(f"/proc/{pid}/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Publisher:
    """A publisher with vLLM's queue length that knows who has subscribed."""

    def __init__(self):
        self.port = free_port()
        self.socket = zmq.Context.instance().socket(zmq.XPUB)
        self.socket.set_hwm(100_000)
        self.socket.bind(f"tcp://127.0.0.1:{self.port}")
        self.endpoint = f"tcp://127.0.0.1:{self.port}"

    def wait_for_subscriber(self):
        if not self.socket.poll(20_000):
            sys.exit("nobody subscribed within 20 s")
        self.socket.recv()

    def send(self, batches):
        for seq, payload in enumerate(batches):
            self.socket.send_multipart((b"kv-events", seq.to_bytes(8, "big"), payload))

    def close(self):
        self.socket.close(linger=0)


def wait_until(condition, pause, what):
    end = time.monotonic() + 60
    while not condition():
        if time.monotonic() > end:
            sys.exit(f"{what}: not within 60 s")
        time.sleep(pause)


def measured(process, publisher, batches, finished):
    """Feeds an indexer that is subscribed; returns CPU s, wall s, bytes."""
    cpu, memory, start = cpu_seconds(process.pid), resident_bytes(process.pid), time.monotonic()
    publisher.send(batches)
    finished()
    return (
        cpu_seconds(process.pid) - cpu,
        time.monotonic() - start,
        resident_bytes(process.pid) - memory,
    )


def run_ours(program, batches, _):
    publisher = Publisher()
    env = dict(
        os.environ,
        KVROUTER_WIRE_SPEED=publisher.endpoint,
        KVROUTER_WIRE_SPEED_BLOCKS=str(len(batches) * BLOCKS),
    )
    process = subprocess.Popen(
        [program, "-test.run=^TestWireSpeed$", "-test.v"], env=env, stdout=subprocess.PIPE, text=True
    )

    def line(wanted):
        for text in process.stdout:
            if text.startswith(wanted):
                return text.split()[1:]
        sys.exit(f"kvrouter ended without saying {wanted}")

    try:
        publisher.wait_for_subscriber()
        found = []
        result = measured(process, publisher, batches, lambda: found.extend(line("indexed")))
        return (*result, int(found[0]))
    finally:
        process.kill()
        process.wait()
        publisher.close()


def run_dynamo(_, batches, last):
    publisher = Publisher()
    port = free_port()

    def ask(path, body=None):
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer) if answer.headers.get_content_type() == "application/json" else answer.read()

    def up():
        try:
            ask("/health")
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    process = subprocess.Popen(
        [sys.executable, "-m", "dynamo.indexer", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(up, 0.05, "dynamo.indexer starting")
        ask("/register", {"instance_id": 1, "endpoint": publisher.endpoint, "model_name": "m", "block_size": BLOCK_SIZE})
        publisher.wait_for_subscriber()
        query = {"token_ids": last, "model_name": "m"}
        result = measured(
            process,
            publisher,
            batches,
            lambda: wait_until(lambda: ask("/query", query)["scores"], 0.02, "dynamo.indexer indexing"),
        )
        dump = ask("/dump")
        held = sum(
            len(event["event"]["data"]["stored"]["blocks"])
            for model in dump.values()
            for event in model["events"]
        )
        return (*result, held)
    finally:
        process.terminate()
        process.wait()
        publisher.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ours", required=True, help="test binary of kvrouter")
    parser.add_argument("--runs", type=int, default=5, help="runs of each, alternating (default 5)")
    parser.add_argument("--batches", type=int, default=20_000, help="batches of 8 blocks of 16 tokens (default 20000)")
    options = parser.parse_args()

    batches, last = payloads(options.batches)
    blocks = len(batches) * BLOCKS
    print(f"{len(batches)} batches of {BLOCKS} blocks of {BLOCK_SIZE} tokens, {sum(map(len, batches)) / 1e6:.1f} MB of payload")
    results = {"kvrouter": [], "dynamo.indexer": []}
    lost = False
    for run in range(options.runs):
        for name, measure in (("kvrouter", run_ours), ("dynamo.indexer", run_dynamo)):
            cpu, wall, memory, held = measure(options.ours, batches, last)
            results[name].append((cpu, wall, memory))
            lost = lost or held != blocks
            print(f"run {run + 1}  {name:<15} {cpu:6.2f} s CPU  {wall:6.2f} s  {memory / 1e6:6.1f} MB  {held} of {blocks} blocks")
    print(f"\n{'median':<15} {'CPU s':>7} {'us/block':>9} {'wall s':>7} {'MB':>7}")
    medians = {}
    for name, rows in results.items():
        cpu, wall, memory = (statistics.median(column) for column in zip(*rows))
        medians[name] = cpu
        print(f"{name:<15} {cpu:7.2f} {cpu / blocks * 1e6:9.2f} {wall:7.2f} {memory / 1e6:7.1f}")
    ratio = medians["kvrouter"] / medians["dynamo.indexer"]
    print(f"\nkvrouter takes {ratio:.2f} times the CPU of dynamo.indexer (at most 2 wanted)")
    if lost or ratio > 2:
        sys.exit("FAILED: " + ("blocks were lost" if lost else "too much CPU"))


if __name__ == "__main__":
    main()
