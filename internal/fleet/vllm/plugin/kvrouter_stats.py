"""Publishes a vLLM engine's load over ZMQ, for the router that started it.

vLLM finds this module through the entry-point group vllm.stat_logger_plugins
and calls record() after every engine step, on the event loop of its API
server. record() therefore only leaves the newest numbers behind; a thread
sends them, at once when they are new and once a second otherwise, so that a
subscriber that comes late has a value soon. Nothing here may raise or block:
a worker without a load report still serves.

A message is one frame of JSON: num_waiting_reqs and num_running_reqs
(requests), kv_cache_usage (0 to 1).
"""

import json
import logging
import os
import threading

import zmq
from vllm.v1.metrics.loggers import StatLoggerBase

ENDPOINT_VARIABLE = "KVROUTER_LOAD_ENDPOINT"
HEARTBEAT_SECONDS = 1.0

logger = logging.getLogger("vllm.kvrouter")


def endpoint_of_rank(endpoint, rank):
    """Ranks of one worker take consecutive ports, as their KV events do."""
    if rank == 0:
        return endpoint
    address, port = endpoint.rsplit(":", 1)
    return f"{address}:{int(port) + rank}"


class LoadPublisher(StatLoggerBase):
    def __init__(self, vllm_config, engine_index=0):
        self._latest = (0, 0, 0.0)
        self._fresh = threading.Event()
        endpoint = os.environ.get(ENDPOINT_VARIABLE)
        if not endpoint:
            return
        try:
            socket = zmq.Context.instance().socket(zmq.PUB)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(endpoint_of_rank(endpoint, engine_index))
        except Exception as error:
            logger.warning("load is not published on %s: %s", endpoint, error)
            return
        threading.Thread(
            target=self._publish, args=(socket,), daemon=True, name="kvrouter-load"
        ).start()

    def record(self, scheduler_stats=None, iteration_stats=None, *args, **kwargs):
        if scheduler_stats is None:
            return
        # Requests that wait for something else than room count as waiting, as
        # in vllm:num_requests_waiting; older engines do not tell them apart.
        waiting = getattr(scheduler_stats, "num_waiting_reqs", 0) + getattr(
            scheduler_stats, "num_skipped_waiting_reqs", 0
        )
        self._latest = (
            waiting,
            getattr(scheduler_stats, "num_running_reqs", 0),
            getattr(scheduler_stats, "kv_cache_usage", 0.0),
        )
        self._fresh.set()

    def log_engine_initialized(self):
        self._fresh.set()

    def _publish(self, socket):
        """Runs until the process ends: the only user of the socket."""
        while True:
            self._fresh.wait(HEARTBEAT_SECONDS)
            self._fresh.clear()
            waiting, running, usage = self._latest
            message = {
                "num_waiting_reqs": waiting,
                "num_running_reqs": running,
                "kv_cache_usage": usage,
            }
            try:
                socket.send(json.dumps(message).encode(), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno in (zmq.ETERM, zmq.ENOTSOCK):
                    return
