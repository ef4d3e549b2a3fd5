"""Publishes KV events for the Go tests, through vLLM's own ZmqEventPublisher.

Commands come as JSON lines on stdin, each answered by one JSON line on stdout
once it is done. Every publisher is a forked process, so that importing vLLM is
paid once and a publisher can be killed as an engine is.

  {"op": "spawn", "id": "a", "endpoint": .., "replay": .., "topic": .., "buffer": 10000, "rank": 0}
  {"op": "publish", "id": "a", "batches": [[event, ...], ...]}
  {"op": "kill", "id": "a"}

An event is {"stored": [hashes], "parent": .., "tokens": [..], "block_size": n, ..},
{"removed": [hashes], ..}, {"cleared": true} or {"raw": "msgpack in hex"}.
"""

import json
import multiprocessing
import os
import signal
import sys
import time

import msgspec
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    ZmqEventPublisher,
)


def event(spec):
    spec = dict(spec)
    if "raw" in spec:
        return msgspec.Raw(bytes.fromhex(spec["raw"]))
    if "cleared" in spec:
        return AllBlocksCleared()
    if "removed" in spec:
        return BlockRemoved(block_hashes=spec.pop("removed"), medium=spec.pop("medium", "GPU"), **spec)
    return BlockStored(
        block_hashes=spec.pop("stored"),
        parent_block_hash=spec.pop("parent", None),
        token_ids=spec.pop("tokens"),
        block_size=spec.pop("block_size"),
        lora_id=spec.pop("lora_id", None),
        medium=spec.pop("medium", "GPU"),
        lora_name=spec.pop("lora_name", None),
        **spec,
    )


def publish_until_killed(pipe, spec):
    publisher = ZmqEventPublisher(
        data_parallel_rank=spec.get("rank", 0),
        endpoint=spec["endpoint"],
        replay_endpoint=spec.get("replay") or None,
        buffer_steps=spec.get("buffer", 10000),
        topic=spec.get("topic", "kv-events"),
    )
    pipe.send({"ok": True})
    while True:
        for batch in pipe.recv()["batches"]:
            publisher.publish(EventBatch(ts=time.time(), events=[event(e) for e in batch]))
        while publisher._event_queue.unfinished_tasks:
            time.sleep(0.001)
        pipe.send({"ok": True})


def main():
    fork = multiprocessing.get_context("fork")
    children = {}
    print(json.dumps({"ok": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        name = command["id"]
        if command["op"] == "spawn":
            ours, theirs = fork.Pipe()
            child = fork.Process(target=publish_until_killed, args=(theirs, command), daemon=True)
            child.start()
            theirs.close()
            children[name] = (child, ours)
            reply = ours.recv()
        elif command["op"] == "publish":
            children[name][1].send(command)
            reply = children[name][1].recv()
        else:
            child, ours = children.pop(name)
            os.kill(child.pid, signal.SIGKILL)
            child.join()
            ours.close()
            reply = {"ok": True}
        print(json.dumps(reply), flush=True)
    for child, _ in children.values():
        child.kill()
        child.join()


if __name__ == "__main__":
    main()
