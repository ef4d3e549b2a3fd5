"""Lets NIXL's progress thread wait in poll() where it would ask without pause.

NIXL's Python API fixes the longest wait of that thread at 0, so that in every
worker it takes a whole core from the engine, requests or not. UCX wakes the
thread when something arrives; the wait set here is only for what comes without
waking. This plugin of the group vllm.general_plugins is loaded in every process
of vLLM before the engine is made. Where NIXL has changed so much that this
fails, a warning says so and NIXL serves as it is.
"""

import logging
import os
import sys

VARIABLE = "KVROUTER_NIXL_POLL_US"  # microseconds

logger = logging.getLogger("vllm.kvrouter")


def install():
    wait = os.environ.get(VARIABLE)
    if not wait:
        return
    try:
        _install(int(wait))
    except Exception as error:
        logger.warning("NIXL's progress thread takes a core of its own: %s", error)


def _install(wait):
    # vLLM's own way to the class, which first sets what UCX reads once.
    from vllm.distributed.nixl_utils import NixlWrapper

    if NixlWrapper is None:
        return
    bindings = sys.modules[NixlWrapper.__module__].nixlBind

    class WaitingAgent(bindings.nixlAgent):
        def __init__(self, name, config):
            config.pthrDelay = wait
            super().__init__(name, config)

    bindings.nixlAgent = WaitingAgent
