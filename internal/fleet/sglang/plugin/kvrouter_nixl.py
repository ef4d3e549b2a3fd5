"""Makes NIXL fit for workers on a CPU.

SGLang names the memory of its KV cache as a GPU's, which NIXL looks for in
vain: here the name stands for the machine's memory. And NIXL's Python API fixes
the longest wait of its progress thread at 0, so that in every worker it takes a
whole core from the engine, requests or not. UCX wakes the thread when something
arrives; the wait set here is only for what comes without waking. This plugin of
the group sglang.srt.plugins is loaded in every process of SGLang before the
engine is made. Where NIXL has changed so much that this fails, a warning says
so and NIXL serves as it is.
"""

import logging
import os
import sys

VARIABLE = "KVROUTER_NIXL_POLL_US"  # microseconds; set on a CPU only

logger = logging.getLogger("sglang.kvrouter")


def install():
    wait = os.environ.get(VARIABLE)
    if not wait:
        return
    try:
        _install(int(wait))
    except Exception as error:
        logger.warning("NIXL is not fit for a CPU: %s", error)


def _install(wait):
    from nixl._api import nixl_agent

    bindings = sys.modules[nixl_agent.__module__].nixlBind

    class WaitingAgent(bindings.nixlAgent):
        def __init__(self, name, config):
            config.pthrDelay = wait
            super().__init__(name, config)

    bindings.nixlAgent = WaitingAgent

    make = nixl_agent.__init__

    def make_on_host(self, *args, **kwargs):
        make(self, *args, **kwargs)
        self.nixl_mems["VRAM"] = self.nixl_mems["DRAM"]

    nixl_agent.__init__ = make_on_host
