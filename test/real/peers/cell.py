"""A whole cell of Dynamo's in one process: a simulated worker, the frontend, and the relay. For dynamocell_test.go.

Usage: cell.py HTTP_PORT RELAY_PORT DATA_CENTER BLOCK_SIZE MODEL_FOLDER. Discovery is in memory, and KV events go over
ZeroMQ, so that nothing else has to run. The end of stdin ends it.
"""

import asyncio
import os
import sys

from dynamo.llm import (
    EngineType,
    EntrypointArgs,
    KvDcRelay,
    KvRouterConfig,
    ModelRuntimeConfig,
    RouterConfig,
    RouterMode,
    make_engine,
    run_input,
)
from dynamo.runtime import DistributedRuntime

HOST = "127.0.0.1"


async def main(http_port, relay_port, data_center, block_size, folder):
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, "mem", "tcp", event_plane="zmq")
    config = ModelRuntimeConfig()
    config.enable_local_indexer = True
    endpoint = "dyn://prod.backend.generate"
    engine = {"backend": "vllm", "num_gpu_blocks": 4096, "block_size": block_size, "speedup_ratio": 20.0, "emit_kv_events": True}
    worker = await make_engine(runtime, EntrypointArgs(
        EngineType.Mocker, model_path=folder, model_name="m", endpoint_id=endpoint, kv_cache_block_size=block_size,
        mocker_engine_args={"engine": engine}, runtime_config=config,
    ))
    frontend = await make_engine(runtime, EntrypointArgs(
        EngineType.Dynamic, http_host=HOST, http_port=http_port, router_config=RouterConfig(RouterMode.KV, KvRouterConfig()),
    ))
    relay = KvDcRelay(
        runtime.endpoint("dynamo.kv_dc_relay.control"), data_center,
        watch_all=True, expected_unique_blocks=16384, bind=f"{HOST}:{relay_port}",
    )
    await relay.start()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    parts = [asyncio.ensure_future(run_input(runtime, endpoint, worker)), asyncio.ensure_future(run_input(runtime, "http", frontend))]
    ended, _ = await asyncio.wait([*parts, asyncio.ensure_future(reader.read())], return_when=asyncio.FIRST_COMPLETED)
    for part in ended:
        print("ended:", part.exception(), file=sys.stderr, flush=True)
    os._exit(0)  # the runtime's threads would keep the interpreter


asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5]))
