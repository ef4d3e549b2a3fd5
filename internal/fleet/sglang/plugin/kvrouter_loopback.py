"""Keeps a worker's ZeroMQ sockets on this machine.

SGLang binds the sockets of its KV events and load on every network interface:
up to 0.5.21 it connects to any other address. This plugin of the group
sglang.srt.plugins, loaded in every process of SGLang before the engine is made,
lets each bind that names every interface name loopback instead. Where pyzmq has
changed so much that this fails, a warning says so and SGLang binds as it is
told.
"""

import logging
import os

VARIABLE = "KVROUTER_LOOPBACK"
WILDCARDS, LOOPBACK = ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:"), "tcp://127.0.0.1:"

logger = logging.getLogger("sglang.kvrouter")


def install():
    if os.environ.get(VARIABLE) != "1":
        return
    try:
        _install()
    except Exception as error:
        logger.warning("KV events and load are published on every network interface: %s", error)


def _install():
    import zmq

    # Also the base of zmq.asyncio's sockets.
    bind = zmq.Socket.bind

    def bind_loopback(self, addr):
        for wildcard in WILDCARDS:
            if isinstance(addr, str) and addr.startswith(wildcard):
                addr = LOOPBACK + addr[len(wildcard) :]
        return bind(self, addr)

    zmq.Socket.bind = bind_loopback
