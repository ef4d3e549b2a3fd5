"""Writes media.json: block hashes of prompts with media, by Dynamo's own bindings.

Run it with a Python that has ai-dynamo-runtime, such as that of scripts/peers.sh:
    python internal/base/kv/testdata/media.py
"""

import json
import pathlib
import random

from dynamo._core import compute_block_hash_for_seq

LARGEST = 2**64 - 1


def info(*hashes):
    return {"mm_objects": [{"mm_hash": h, "offsets": [[0, 1]]} for h in hashes]}


def cases():
    yield 4, 12, [], None
    yield 4, 12, [None, info(1), None], None
    yield 4, 12, [None, info(2)], None
    yield 4, 12, [None, info(2, 1)], None
    yield 4, 12, [None, info(1, 2)], None
    yield 4, 12, [None, info(5, 5)], None
    yield 4, 12, [info()], None
    yield 4, 12, [info(LARGEST), info(0), info(2**63)], None
    yield 4, 11, [info(1)] * 9, None
    yield 4, 12, [info(2, 1), info(7)], "sql"
    yield 256, 600, [info(*range(200, 0, -1)), info(3)], None
    rng = random.Random(15)
    for size in (1, 2, 16, 64):
        for _ in range(4):
            blocks = rng.randint(1, 6)
            infos = [
                rng.choice(
                    [None, info(*(rng.randint(0, LARGEST) for _ in range(rng.randint(0, 4))))]
                )
                for _ in range(rng.randint(0, blocks + 1))
            ]
            yield size, blocks * size + rng.randint(0, size - 1), infos, rng.choice([None, "a"])


def main():
    out = []
    for size, length, infos, lora in cases():
        tokens = list(range(1, length + 1))
        hashes = compute_block_hash_for_seq(tokens, size, infos, lora_name=lora)
        words = [i and [o["mm_hash"] for o in i["mm_objects"]] for i in infos]
        out.append({"block_size": size, "tokens": length, "media": words, "lora": lora or "", "hashes": hashes})
    file = pathlib.Path(__file__).with_suffix(".json")
    file.write_text("[\n" + ",\n".join(json.dumps(c) for c in out) + "\n]\n")


main()
