"""Lets SGLang keep KV blocks in host memory where the engine is a CPU.

SGLang's hierarchical cache registers its host memory with CUDA, copies by a
compiled kernel that it imports for GPUs only, and waits for streams. On a CPU
none of the three is there. This plugin of the group sglang.srt.plugins, loaded
in every process of SGLang before the engine is made, leaves memory
unregistered and copies with torch. Use --hicache-io-backend direct and
--hicache-mem-layout layer_first. Where SGLang has changed so much that this
fails, a warning says so and SGLang fails itself.
"""

import logging
import os

VARIABLE = "KVROUTER_CPU_TIERS"  # 1; set on a CPU only

logger = logging.getLogger("sglang.kvrouter")


def install():
    if os.environ.get(VARIABLE) != "1":
        return
    try:
        _install()
    except Exception as error:
        logger.warning("KV blocks cannot be offloaded on a CPU: %s", error)


def copy_pages(src_layers, dst_layers, src_indices, dst_indices, page_size):
    """Copies tokens between buffers of the same layers, whose shapes may differ.

    The compiled one goes page by page; here each token has its index.
    """
    for source, target in zip(src_layers, dst_layers):
        rows = source[src_indices]
        target[dst_indices] = rows.reshape(-1, *target.shape[1:])


def _install():
    import torch
    from sglang.srt.mem_cache.pool_host import common, mha

    common._cuda_host_register = lambda *args, **kwargs: None
    mha.transfer_kv_direct = copy_pages

    # Buffers for pages read back from storage would be pinned, too.
    make = mha.MHATokenToKVPoolHost.__init__

    def make_unpinned(self, *args, **kwargs):
        make(self, *args, **kwargs)
        self.pin_memory = False

    mha.MHATokenToKVPoolHost.__init__ = make_unpinned
    if not hasattr(torch.cpu.Stream, "synchronize"):
        torch.cpu.Stream.synchronize = lambda self: None
