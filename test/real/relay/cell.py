"""A real Dynamo relay (dynamo.llm.KvDcRelay of ai-dynamo-runtime) with one worker, for relay_test.go.

Usage: cell.py HOST:PORT BLOCK_SIZE MODEL_FOLDER. Each line of stdin is a JSON list, a command and its arguments; each
command is answered by one JSON line on stdout. The end of stdin ends it. Discovery is in memory, and KV events go over
ZeroMQ, so that nothing else has to run.
"""

import asyncio
import json
import os
import sys

from dynamo.llm import (
    KvDcRelay,
    KvEventPublisher,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerType,
    compute_block_hash_for_seq,
    register_model,
)
from dynamo.runtime import DistributedRuntime


async def generate(_request):
    yield {}


async def main(bind, block_size, folder):
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, "mem", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint("prod.backend.generate")
    serving = asyncio.ensure_future(endpoint.serve_endpoint(generate))
    config = ModelRuntimeConfig()
    config.total_kv_blocks = 1000
    config.max_num_batched_tokens = 8192
    config.max_num_seqs = 8
    config.enable_local_indexer = True
    await register_model(
        ModelInput.Tokens, ModelType.Chat, endpoint, folder, "m",
        worker_type=WorkerType.Aggregated, kv_cache_block_size=block_size, runtime_config=config, model_aliases=["m-alias"],
    )
    publisher = KvEventPublisher(endpoint, kv_block_size=block_size, enable_local_indexer=True)
    relay = KvDcRelay(
        runtime.endpoint("dynamo.kv_dc_relay.control"), "dc-a",
        watch_all=True, expected_unique_blocks=256, bind=bind, tuning={"pool_heartbeat_interval_ms": 500, "load_window_ms": 200},
    )
    await relay.start()

    def stored(tokens, hashes, parent, lora, salt):
        publisher.publish_stored(tokens, [block_size] * len(hashes), hashes, parent, None, lora, None, salt)

    def hashes(tokens, lora, eagle, salt):
        return compute_block_hash_for_seq(tokens, block_size, None, lora, eagle, salt)

    commands = {
        "stored": stored,
        "removed": publisher.publish_removed,
        "hashes": hashes,
    }
    print(json.dumps("ready"), flush=True)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        name, *arguments = json.loads(line)
        print(json.dumps(commands[name](*arguments)), flush=True)
    await relay.shutdown()
    serving.cancel()
    os._exit(0)  # the runtime's threads would keep the interpreter


asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
