"""Writes what vLLM's own publisher sends, for each version of its event classes.

PYTHON versions.py FOLDER VERSION... with a Python that has msgspec and pyzmq, and, for
each version, vllm/distributed/kv_events.py of its wheel in FOLDER/VERSION. The file runs
as it is: classes, encoder and sockets are that version's. versions/vllm-VERSION.json has
the frames of a subscriber and of a replay from batch 1.
"""

import base64
import importlib.util
import json
import os
import pathlib
import shutil
import sys
import tempfile
import time
import types
from dataclasses import dataclass
from unittest import mock

import msgspec
import zmq

HERE = pathlib.Path(__file__).parent


@dataclass
class KVEventsConfig:
    enable_kv_cache_events: bool = False
    publisher: str = "null"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""


def load(path):
    """The module of a version, with what it imports of vLLM replaced."""
    for name in ("vllm", "vllm.utils", "vllm.v1", "vllm.v1.core"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["vllm.config"] = types.SimpleNamespace(KVEventsConfig=KVEventsConfig)
    sys.modules["vllm.config.kv_events"] = sys.modules["vllm.config"]
    sys.modules["vllm.utils.network_utils"] = mock.Mock()  # for ports that the system chooses
    sys.modules["vllm.logger"] = types.SimpleNamespace(init_logger=lambda name: mock.Mock())
    sys.modules["vllm.v1.core.kv_cache_utils"] = types.SimpleNamespace(ExternalBlockHash=bytes | int)
    spec = importlib.util.spec_from_file_location("kv_events", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["kv_events"] = module
    spec.loader.exec_module(module)
    return module


def make(cls, **values):
    """An event, with those of the values that the version's class has."""
    fields = {f.name: f for f in msgspec.structs.fields(cls)}
    values = {k: v for k, v in values.items() if k in fields}
    for name, field in fields.items():
        if field.required and name not in values:
            values[name] = None
    return cls(**values)


def batches(m, digests):
    """Blocks of four tokens: stored, one removed, one stored behind the rest, all cleared."""
    ids = [bytes([i]) * 32 if digests else (-1) ** i * (2**62 + i) for i in range(5)]
    group = dict(medium="GPU", group_idx=0, kv_cache_spec_kind="full_attention")
    yield [
        make(m.BlockStored, block_hashes=ids[:3], parent_block_hash=None, token_ids=list(range(1, 13)), block_size=4, **group),
        make(m.BlockStored, block_hashes=ids[4:], parent_block_hash=None, token_ids=[9, 8, 7, 6], block_size=4, lora_id=1, lora_name="sql", extra_keys=[("sql",)], **group),
    ]
    yield [make(m.BlockRemoved, block_hashes=ids[2:3], **group)]
    yield [make(m.BlockStored, block_hashes=ids[3:4], parent_block_hash=ids[1], token_ids=[21, 22, 23, 24], block_size=4, **group)]
    yield [m.AllBlocksCleared()]


def main(folder, version):
    m = load(os.path.join(folder, version, "vllm/distributed/kv_events.py"))
    known = tuple(map(int, version.split(".")[:3]))
    context = zmq.Context.instance()
    sub, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    folder = tempfile.mkdtemp()
    at = {name: f"ipc://{folder}/{name}" for name in ("endpoint", "replay_endpoint")}
    ranked = {} if known < (0, 9, 1) else dict(data_parallel_rank=0)
    publisher = m.ZmqEventPublisher(topic="kv-events", **at, **ranked)
    sub.subscribe("kv-events")
    sub.connect(at["endpoint"])
    replay.connect(at["replay_endpoint"])
    time.sleep(0.5)
    frames = lambda socket: [base64.b64encode(f).decode() for f in socket.recv_multipart()]
    live = []
    for events in batches(m, digests=known >= (0, 11, 0)):
        publisher.publish(m.KVEventBatch(ts=1700000000.5, events=events))
        live.append(frames(sub))
    replay.send_multipart([b"", (1).to_bytes(8, "big")])
    replayed = [frames(replay) for _ in range(len(live))]  # those from 1 on, and the mark of the end
    publisher.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
    (HERE / "versions").mkdir(exist_ok=True)
    with open(HERE / "versions" / f"vllm-{'.'.join(map(str, known))}.json", "w") as out:
        json.dump(dict(live=live, replay=replayed), out, indent=1)
        out.write("\n")


if __name__ == "__main__":
    for each in sys.argv[2:]:
        if os.fork() == 0:
            main(sys.argv[1], each)
            os._exit(0)
        if os.wait()[1] != 0:
            sys.exit(f"{each} failed")
