"""Stands in for SGLang's compiled kernels on a CPU.

On a CPU SGLang imports many names of the package sgl_kernel and calls them
where AMX is at hand; else its layers compute in plain torch. The package for
GPUs cannot be imported without CUDA's driver and has none of these names, and
the one for CPUs is on no package index. Here every name is there. What is
called without AMX, too, is written out; what is not says so when it is called.

Nothing here may define torch.ops.sgl_kernel.convert_weight_packed: by that name
SGLang finds out whether AMX is to be used.
"""

import sys
import types

import torch

__version__ = "0.4.10"
__path__ = []  # a package, so that its modules can be named


def assign_req_to_token_pool_cpu(pool_indices, pool, start, end, locations, width):
    """Writes the new cache locations of each request into its row of the pool.

    Request r has row pool_indices[r] and columns start[r] to end[r]; the
    locations of all requests lie one after the other. width, the length of a
    row, is only wanted by the compiled one.
    """
    spans = zip(pool_indices.tolist(), start.tolist(), end.tolist())
    done = 0
    for row, first, last in spans:
        pool[row, first:last] = locations[done : done + last - first].to(pool.dtype)
        done += last - first


def murmur_hash32_cpu(seed, positions, columns):
    """MurmurHash3 (32 bits) of each request's seed and position with each column.

    The words hashed are the seed's lower and upper half, the position and the
    column. It draws the tokens of requests with a seed.
    """
    mask = 0xFFFFFFFF

    def rotate(x, by):
        return ((x << by) | (x >> (32 - by))) & mask

    def mix(h, word):
        word = (word * 0xCC9E2D51) & mask
        word = (rotate(word, 15) * 0x1B873593) & mask
        return (rotate(h ^ word, 13) * 5 + 0xE6546B64) & mask

    seed = seed.to(torch.int64)
    h = mix(torch.zeros_like(seed), seed & mask)
    h = mix(h, (seed >> 32) & mask)
    h = mix(h, positions.to(torch.int64) & mask)
    h = mix(h[:, None], columns.to(torch.int64)[None, :] & mask)
    h ^= 16  # bytes hashed
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & mask
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & mask
    return (h ^ (h >> 16)).to(torch.uint32)


_operators = torch.library.Library("sgl_kernel", "FRAGMENT")
_operators.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
_operators.impl("murmur_hash32_cpu", murmur_hash32_cpu, "CPU")


def _missing(name):
    def kernel(*args, **kwargs):
        raise NotImplementedError(f"{name} has no stand-in on a CPU")

    kernel.__name__ = name.rpartition(".")[2]
    return kernel


class _Kernels(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _missing(f"{self.__name__}.{name}")


sys.modules[__name__].__class__ = _Kernels
for _module in ("kvcacheio",):
    sys.modules[f"{__name__}.{_module}"] = _Kernels(f"{__name__}.{_module}")
