"""Lets the process that shares requests out among ranks sleep without any.

With data-parallel ranks one process of SGLang hands each request to its rank.
It asks its socket for the next one without pause, which takes a whole core of
a CPU that the ranks compute on. This plugin of the group sglang.srt.plugins,
loaded in every process of SGLang before the engine is made, lets it wait there;
a request ends the wait at once. Where SGLang has changed so much that this
fails, a warning says so and SGLang asks on.
"""

import logging
import os
import sys

VARIABLE = "KVROUTER_IDLE_POLL_MS"  # milliseconds; set on a CPU only
MODULE = "sglang.srt.managers.data_parallel_controller"

logger = logging.getLogger("sglang.kvrouter")


def install():
    wait = os.environ.get(VARIABLE)
    if not wait or MODULE not in sys.modules:
        return
    try:
        _install(sys.modules[MODULE], int(wait))
    except Exception as error:
        logger.warning("sharing out requests takes a core of its own: %s", error)


def _install(module, wait):
    import zmq

    receive = module.sock_recv

    def wait_and_receive(socket, flags=0):
        if flags & zmq.NOBLOCK:
            socket.poll(wait)
        return receive(socket, flags)

    module.sock_recv = wait_and_receive
