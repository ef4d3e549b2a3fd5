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
