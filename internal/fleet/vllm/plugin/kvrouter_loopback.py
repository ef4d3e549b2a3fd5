"""Keeps a worker's KV events on this machine.

vLLM binds its event socket only where the endpoint has a wildcard, which means
every network interface, and events carry the tokens of prompts. This plugin of
the group vllm.general_plugins, loaded in every process of vLLM before the
engine is made, lets the stock publisher bind loopback instead. Where vLLM has
changed so much that this fails, a warning says so and the stock publisher
serves.
"""

import functools
import logging
import os
import types

VARIABLE = "KVROUTER_LOOPBACK_EVENTS"
WILDCARD, LOOPBACK = "tcp://*:", "tcp://127.0.0.1:"

logger = logging.getLogger("vllm.kvrouter")


def install():
    if os.environ.get(VARIABLE) != "1":
        return
    try:
        _install()
    except Exception as error:
        logger.warning("KV events listen on every network interface: %s", error)


def _install():
    import zmq
    from vllm.distributed.kv_events import EventPublisherFactory, ZmqEventPublisher

    class LoopbackSocket(zmq.Socket):
        def bind(self, address):
            return super().bind(address.replace(WILDCARD, LOOPBACK, 1))

    class LoopbackEventPublisher(ZmqEventPublisher):
        def _socket_setup(self):
            make = functools.partial(self._ctx.socket, socket_class=LoopbackSocket)
            self._ctx = types.SimpleNamespace(socket=make)
            super()._socket_setup()

    # register_publisher refuses a name that exists.
    EventPublisherFactory._registry["zmq"] = LoopbackEventPublisher
