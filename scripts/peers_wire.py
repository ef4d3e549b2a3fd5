"""Publishes KV-event batches to two indexers in turn and compares their CPU.

Both receive the same payloads, in vLLM's current format, from one pyzmq publisher as
fast as it can send. CPU is user + system time of the indexer's process from the
subscription until it has indexed every block; then the indexed blocks are counted.
Started by peers.sh in the venv of Dynamo.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.request

import msgspec
import zmq

import peers_common as peers

BLOCKS, BLOCK_SIZE = 8, 16


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


class Publisher:
    """A publisher with vLLM's queue length that detects subscriptions."""

    def __init__(self):
        self.socket = zmq.Context.instance().socket(zmq.XPUB)
        self.socket.set_hwm(100_000)
        self.socket.bind("tcp://127.0.0.1:*")
        self.endpoint = self.socket.last_endpoint.decode()

    def wait_for_subscriber(self):
        if not self.socket.poll(20_000):
            sys.exit("no subscription within 20 s")
        self.socket.recv()

    def send(self, batches):
        for seq, payload in enumerate(batches):
            self.socket.send_multipart((b"kv-events", seq.to_bytes(8, "big"), payload))

    def close(self):
        self.socket.close(linger=0)


def measured(process, publisher, batches, finished):
    """Feeds an indexer that is subscribed; returns CPU s, wall s, bytes."""
    cpu, memory, start = peers.cpu_seconds(process.pid), peers.resident_bytes(process.pid), time.monotonic()
    publisher.send(batches)
    finished()
    return (
        peers.cpu_seconds(process.pid) - cpu,
        time.monotonic() - start,
        peers.resident_bytes(process.pid) - memory,
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
        peers.end_all([process])
        publisher.close()


def run_dynamo(_, batches, last):
    publisher = Publisher()
    [port] = peers.free_ports(1)

    def ask(path, body=None):
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer) if answer.headers.get_content_type() == "application/json" else answer.read()

    process = subprocess.Popen(
        [sys.executable, "-m", "dynamo.indexer", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        peers.wait_for("dynamo.indexer starting", 60, lambda: peers.answers(f"http://127.0.0.1:{port}/health"))
        ask("/register", {"instance_id": 1, "endpoint": publisher.endpoint, "model_name": "m", "block_size": BLOCK_SIZE})
        publisher.wait_for_subscriber()
        query = {"token_ids": last, "model_name": "m"}
        result = measured(
            process,
            publisher,
            batches,
            lambda: peers.wait_for("dynamo.indexer indexing", 60, lambda: ask("/query", query)["scores"], 0.02),
        )
        dump = ask("/dump")
        held = sum(
            len(event["event"]["data"]["stored"]["blocks"])
            for model in dump.values()
            for event in model["events"]
        )
        return (*result, held)
    finally:
        peers.end_all([process])
        publisher.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ours", required=True, help="test binary of kvrouter")
    parser.add_argument("--runs", type=int, default=5, help="runs of each, alternating (default 5)")
    parser.add_argument("--batches", type=int, default=20_000, help="batches of 8 blocks of 16 tokens (default 20000)")
    options = parser.parse_args()
    peers.give_up_after(180)

    batches, last = payloads(options.batches)
    blocks = len(batches) * BLOCKS
    results = {"kvrouter": [], "dynamo.indexer": []}
    lost = 0
    for run in range(options.runs):
        for name, measure in (("kvrouter", run_ours), ("dynamo.indexer", run_dynamo)):
            *row, held = measure(options.ours, batches, last)
            results[name].append(row)
            lost += blocks - held
        print(f"peers: wire run {run + 1} of {options.runs} done", file=sys.stderr)
    print(f"From the wire into the index: {len(batches)} event batches of {BLOCKS} blocks of {BLOCK_SIZE} tokens from one publisher, medians of {options.runs} alternating runs\n")
    medians = {name: [statistics.median(column) for column in zip(*rows)] for name, rows in results.items()}
    peers.table(["", "CPU s", "us a block", "wall s", "MB", "bytes a block"],
                [[name, f"{cpu:.2f}", f"{cpu / blocks * 1e6:.2f}", f"{wall:.2f}", f"{memory / 1e6:.1f}", f"{memory / blocks:.0f}"]
                 for name, (cpu, wall, memory) in medians.items()])
    checks = peers.Checks("wire")
    ratio = medians["kvrouter"][0] / medians["dynamo.indexer"][0]
    checks.hold(ratio <= 2, f"{ratio:.2f} times the CPU of dynamo.indexer (want 2)")
    checks.hold(lost == 0, f"{lost} blocks lost")
    checks.end()


if __name__ == "__main__":
    main()
