"""Writes the golden event batches of the decoder's tests.

Run it with a Python that has vLLM; the payloads are encoded by vLLM's own
classes, those named array_* by the same classes declared as vLLM declared them
up to 0.23 (array_like). golden.json holds what a reader must find in each.
"""

import json
import pathlib

import msgspec
from vllm.distributed import kv_events as vllm_events
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)

HERE = pathlib.Path(__file__).parent
DIGEST = [bytes(range(i, i + 32)) for i in range(8)]
BIG = 2**63 + 12345


def as_array(cls, count=None):
    """The class as vLLM up to 0.23 declared it: an array with the tag first."""
    fields = []
    for f in msgspec.structs.fields(cls)[:count]:
        default = () if f.default is msgspec.NODEFAULT else (f.default,)
        fields.append((f.name, f.type, *default))
    return msgspec.defstruct(
        cls.__name__, fields, array_like=True, omit_defaults=True, tag=True
    )


EVENTS = (BlockStored, BlockRemoved, AllBlocksCleared)
OLD_EVENTS = tuple(map(as_array, EVENTS))
FIRST_EVENTS = (as_array(BlockStored, 5), as_array(BlockRemoved, 1), OLD_EVENTS[2])


def stored(cls, hashes, parent, tokens, size, **rest):
    rest = {"lora_id": None, "medium": "GPU", "lora_name": None, **rest}
    return cls(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=tokens,
        block_size=size,
        **rest,
    )


def batches(stored_cls, removed_cls, cleared_cls):
    yield "ints", 0, [
        stored(stored_cls, [1, 2], None, list(range(8)), 4, group_idx=0,
               kv_cache_spec_kind="full_attention"),
        stored(stored_cls, [BIG], 2, [5, 128000, 151643, 2**32 - 1], 4),
        removed_cls(block_hashes=[1, BIG], medium="GPU", group_idx=0),
        cleared_cls(),
    ]
    yield "negative_ints", 0, [
        stored(stored_cls, [-1, -(2**63)], -7, list(range(8)), 4),
        removed_cls(block_hashes=[-1], medium=None),
    ]
    yield "digests", 1, [
        stored(stored_cls, DIGEST[:2], DIGEST[7], list(range(300, 332)), 16),
        removed_cls(block_hashes=DIGEST[:3], medium="GPU"),
    ]
    yield "extra_keys", 0, [
        # cache salt in the first block
        stored(stored_cls, [1, 2], None, list(range(8)), 4,
               extra_keys=[("s0",), None]),
        # adapter in every block, salt in the first
        stored(stored_cls, [1, 2], None, list(range(8)), 4, lora_id=3,
               lora_name="sql", extra_keys=[("sql", "s0"), ("sql",)]),
        # an image in the second block, as a pair and as older engines sent it
        stored(stored_cls, [1, 2], None, list(range(8)), 4,
               extra_keys=[None, (("a" * 64, 1),)]),
        stored(stored_cls, [3], 2, list(range(4)), 4, extra_keys=[("a" * 64,)]),
        # prompt embeddings
        stored(stored_cls, [1], None, list(range(4)), 4,
               extra_keys=[("s0", DIGEST[0])]),
        # an adapter that has a number only
        stored(stored_cls, [1], None, list(range(4)), 4, lora_id=3),
    ]
    yield "other_tiers", 0, [
        stored(stored_cls, [1], None, list(range(4)), 4, medium="CPU"),
        removed_cls(block_hashes=[1], medium="STORAGE"),
        stored(stored_cls, [1], None, list(range(4)), 4, group_idx=1,
               kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=128),
        stored(stored_cls, [1], None, list(range(4)), 4, locality="REMOTE",
               ownership="tier", session_id="someone"),
    ]
    yield "empty", None, []


def first_batches(stored_cls, removed_cls, cleared_cls):
    yield "ints", None, [
        stored_cls([1, 2], None, list(range(8)), 4, None),
        stored_cls([3], 2, list(range(4)), 4, 7),
        removed_cls([1, 2]),
        cleared_cls(),
    ]


def number(h):
    """A block hash as vLLM's own 64-bit form (maybe_convert_block_hash)."""
    value = int.from_bytes(h, "big") if isinstance(h, bytes) else h
    return str(value & (2**64 - 1))


def expected(event):
    out = {"type": type(event).__name__}
    if out["type"] == "AllBlocksCleared":
        return out
    out["hashes"] = [number(h) for h in event.block_hashes]
    out["medium"] = getattr(event, "medium", None) or ""
    if out["type"] == "BlockStored":
        parent = event.parent_block_hash
        out["parent"] = "" if parent is None else number(parent)
        out["tokens"] = event.token_ids
        out["block_size"] = event.block_size
        out["lora"] = getattr(event, "lora_name", None) or ""
        out["kind"] = getattr(event, "kv_cache_spec_kind", None) or ""
    return out


def main():
    golden = []
    shapes = {
        "map": batches(*EVENTS),
        "array": batches(*OLD_EVENTS),
        "short": first_batches(*FIRST_EVENTS),
    }
    for shape, made in shapes.items():
        for name, rank, events in made:
            batch = vllm_events.EventBatch(ts=1700000000.5, events=events, data_parallel_rank=rank)
            file = f"{shape}_{name}.bin"
            (HERE / file).write_bytes(msgspec.msgpack.encode(batch))
            golden.append({"file": file, "rank": rank, "events": [expected(e) for e in events]})
    (HERE / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
