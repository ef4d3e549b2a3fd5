"""Lets vLLM offload KV blocks to the machine's memory where the engine is a CPU.

vLLM's OffloadingConnector keeps blocks that its cache evicts in memory of the
machine, and in further tiers behind it. The one class of it that moves bytes
uses streams and events of a GPU, so vLLM refuses to start without one. This
plugin of the group vllm.general_plugins, loaded in every process of vLLM before
the engine is made, replaces that class by one that copies on a thread for each
direction. Scheduling, eviction, events, metrics and the further tiers are
vLLM's own. Where vLLM has changed so much that this fails, a warning says so
and vLLM refuses the connector itself.
"""

import logging
import os

VARIABLE = "KVROUTER_CPU_TIERS"  # 1; set on a CPU only
LOAD_GBPS = "KVROUTER_CPU_TIERS_LOAD_GBPS"  # slows loads to this many GB/s, for measurements

logger = logging.getLogger("vllm.kvrouter")


def install():
    if os.environ.get(VARIABLE) != "1":
        return
    try:
        _install(float(os.environ.get(LOAD_GBPS) or 0))
    except Exception as error:
        logger.warning("KV blocks cannot be offloaded on a CPU: %s", error)


def _install(load_gbps):
    import ctypes
    import time
    from concurrent.futures import ThreadPoolExecutor

    import numpy
    import torch
    from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
    from vllm.v1.kv_offload.cpu import spec
    from vllm.v1.kv_offload.tiering import spec as tiering

    class Side:
        """The tensors of the cache or of the tier: rows of per_row blocks."""

        def __init__(self, tensors, per_row):
            self.tensors, self.per_row = tensors, per_row

        def rows(self, first, blocks):
            """The rows that blocks take, the first one from its block first % per_row on."""
            return -(-(first % self.per_row + blocks) // self.per_row)

        def addresses(self, tensor, rows, first, blocks):
            tensor = self.tensors[tensor]
            block = tensor.shape[1] // self.per_row
            starts = tensor.data_ptr() + numpy.asarray(rows, dtype=numpy.int64) * tensor.stride(0)
            every = (starts[:, None] + numpy.arange(self.per_row) * block).ravel()
            first %= self.per_row
            return every[first : first + blocks].tolist()

    class Mover:
        """Copies from one side to the other, one job after the other."""

        def __init__(self, source, target, groups, gbps=0):
            self.source, self.target, self.groups, self.gbps = source, target, groups, gbps
            self.thread = ThreadPoolExecutor(1, "kvrouter-tiers")
            self.jobs = {}

        def submit(self, job, source, target, cache):
            """cache, one of the two, counts the blocks of each group of layers."""
            copies = list(self.copies(source.block_ids, target.block_ids, cache))
            self.jobs[job] = self.thread.submit(self.run, copies)
            return True

        def copies(self, sources, targets, cache):
            at = to = 0
            for group, (blocks, first) in enumerate(zip(cache.group_sizes, cache.block_indices)):
                if blocks == 0:
                    continue
                end_at = at + self.source.rows(first, blocks)
                end_to = to + self.target.rows(first, blocks)
                for layer in self.groups[group]:
                    tensor, size = layer.tensor_idx, layer.page_size_bytes
                    for s, t in zip(
                        self.source.addresses(tensor, sources[at:end_at], first, blocks),
                        self.target.addresses(tensor, targets[to:end_to], first, blocks),
                        strict=True,
                    ):
                        yield s, t, size
                at, to = end_at, end_to

        def run(self, copies):
            begin = time.perf_counter()
            moved = 0
            for source, target, size in copies:
                ctypes.memmove(target, source, size)
                moved += size
            if self.gbps > 0:
                time.sleep(max(0, moved / (self.gbps * 1e9) - (time.perf_counter() - begin)))
            return moved, time.perf_counter() - begin

        def finished(self):
            for job in [j for j, result in self.jobs.items() if result.done()]:
                moved, seconds = self.jobs.pop(job).result()
                yield TransferResult(job_id=job, success=True, transfer_size=moved, transfer_time=seconds)

        def wait(self, jobs):
            for job in jobs:
                if job in self.jobs:
                    self.jobs[job].result()

    class CopyingWorker(OffloadingWorker):
        def __init__(self, kv_caches, blocks_per_chunk, num_cpu_chunks, mmap_region=None, canonical_layout=False):
            if canonical_layout:
                raise NotImplementedError("the canonical layout of KV blocks is not supported on a CPU")
            self.region = mmap_region  # that further tiers read and write
            cache, tier = [], []
            for kept in kv_caches.tensors:
                cache.append(kept.tensor.view(torch.int8).view(-1, kept.page_size_bytes))
                row = kept.page_size_bytes * blocks_per_chunk
                if mmap_region is None:
                    tier.append(torch.zeros((num_cpu_chunks, row), dtype=torch.int8))
                else:
                    tier.append(mmap_region.create_next_worker_view(row))
            cache, tier = Side(cache, 1), Side(tier, blocks_per_chunk)
            self.stores = Mover(cache, tier, kv_caches.group_data_refs)
            self.loads = Mover(tier, cache, kv_caches.group_data_refs, load_gbps)

        def submit_store(self, job_id, src_spec, dst_spec):
            return self.stores.submit(job_id, src_spec, dst_spec, src_spec)

        def submit_load(self, job_id, src_spec, dst_spec, expedited=False):
            return self.loads.submit(job_id, src_spec, dst_spec, dst_spec)

        def get_finished(self):
            return [*self.stores.finished(), *self.loads.finished()]

        def wait(self, job_ids):
            self.stores.wait(job_ids)
            self.loads.wait(job_ids)

        def shutdown(self):
            self.stores.thread.shutdown()
            self.loads.thread.shutdown()
            if self.region is not None:
                self.region.cleanup()

    def get_worker(self, kv_caches):
        if not self._worker:
            self._worker = self.create_worker(kv_caches)
        return self._worker

    spec.CPUOffloadingSpec.get_worker = get_worker
    spec.CPUOffloadingWorker = CopyingWorker
    tiering.CPUOffloadingWorker = CopyingWorker
