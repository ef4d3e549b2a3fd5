"""Writes cases.json: prompts with media as vLLM's render routes and KV events tell them.

Run it with a Python that has vLLM and PYTHONHASHSEED=0, which makes the hashes the
same each time. The answers are vLLM's GenerateRequest, the events its BlockStored;
its own functions compute the blocks' extra keys and hashes.
"""

import base64
import json
import pathlib

import msgspec
from vllm.distributed.kv_events import BlockStored, KVEventBatch
from vllm.entrypoints.scale_out.token_in_token_out.protocol import (
    GenerateRequest,
    MultiModalFeatures,
    PlaceholderRangeInfo,
)
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

BLOCK = 16
PAD, START, END = 151655, 151652, 151653
A, B = "a3" * 32, "1b" * 32  # digests; A's is the larger
LONG = "c5" * 64  # of sha512


def text(n, first=100):
    return list(range(first, first + n))


def image(identifier, length, modality="image"):
    """Placeholders between separators, as Qwen-VL has them."""
    return [START, (modality, identifier, length), END]


def bare(identifier, length, modality="image"):
    return [(modality, identifier, length)]


CASES = {
    "text alone": dict(parts=text(70)),
    "an image": dict(parts=text(20) + image(A, 40) + text(30)),
    "the same image again, with tensors": dict(parts=text(20) + image(A, 40) + text(30), tensors=True),
    "another image": dict(parts=text(20) + image(B, 40) + text(30)),
    "an image and more text": dict(parts=text(20) + image(A, 40) + text(60)),
    "two images": dict(parts=text(5) + image(A, 30) + text(3) + image(B, 30) + text(30)),
    "two images, exchanged": dict(parts=text(5) + image(B, 30) + text(3) + image(A, 30) + text(30)),
    "one image twice": dict(parts=text(5) + image(A, 30) + text(3) + image(A, 30) + text(30)),
    "two images in one block": dict(parts=image(A, 3) + text(2) + image(B, 3) + text(40)),
    "two images in one block, exchanged": dict(parts=image(B, 3) + text(2) + image(A, 3) + text(40)),
    "one image twice in one block": dict(parts=image(A, 3) + text(2) + image(A, 3) + text(40)),
    "images without separators": dict(parts=bare(A, 24) + bare(B, 24) + text(20)),
    "images without separators, exchanged": dict(parts=bare(B, 24) + bare(A, 24) + text(20)),
    "an image and a sound": dict(parts=text(9) + image(A, 12) + text(4) + image(B, 20, "audio") + text(30)),
    "a sound and an image": dict(parts=text(9) + image(A, 12, "audio") + text(4) + image(B, 20) + text(30)),
    "an image from the first token": dict(parts=bare(A, 16) + text(40)),
    "an image that fills two blocks": dict(parts=text(16) + bare(A, 32) + text(33)),
    "an image at the end": dict(parts=text(16) + bare(A, 48)),
    "an image over many blocks": dict(parts=text(3) + image(B, 400) + text(30)),
    "a client's uuid": dict(parts=text(20) + image("photo-1", 40) + text(30)),
    "a client's other uuid": dict(parts=text(20) + image("photo-2", 40) + text(30)),
    "a long digest": dict(parts=text(20) + image(LONG, 40) + text(30)),
    "a salt": dict(parts=text(4) + image(A, 40) + text(30), salt="s0"),
    "another salt": dict(parts=text(4) + image(A, 40) + text(30), salt="s1"),
    "an adapter": dict(parts=text(4) + image(A, 40) + text(30), lora="sql"),
}


def flat(parts):
    tokens, items = [], []
    for p in parts:
        if isinstance(p, tuple):
            items.append((p[0], p[1], len(tokens), p[2]))
            tokens += [PAD] * p[2]
        else:
            tokens.append(p)
    return tokens, items


def answer(tokens, items, salt, tensors):
    """What /v1/chat/completions/render answers."""
    features = None
    if items:
        by = lambda f: {m: [f(i) for i in items if i[0] == m] for m in dict.fromkeys(i[0] for i in items)}
        features = MultiModalFeatures(
            mm_hashes=by(lambda i: i[1]),
            mm_placeholders=by(lambda i: PlaceholderRangeInfo(offset=i[2], length=i[3])),
            kwargs_data=by(lambda i: "gqNmb28=") if tensors else None,
        )
    return GenerateRequest(
        request_id="chatcmpl-1", token_ids=tokens, features=features, sampling_params=SamplingParams(max_tokens=3),
        model="m", cache_salt=salt,
    ).model_dump(mode="json")


def events(tokens, items, salt, lora):
    """A batch with the prompt's full blocks, and their hashes."""
    request = Request(
        request_id="r", prompt_token_ids=tokens, sampling_params=SamplingParams(max_tokens=3), pooling_params=None,
        mm_features=[
            MultiModalFeatureSpec(
                data=None, modality=m, identifier=i, mm_position=PlaceholderRange(offset=at, length=n), mm_hash=i
            )
            for m, i, at, n in items
        ],
        lora_request=LoRARequest(lora_name=lora, lora_int_id=1, lora_path="/l") if lora else None,
        cache_salt=salt,
        block_hasher=kv_cache_utils.get_request_block_hasher(BLOCK, sha256_cbor),
    )
    hashes, keys, next_item = request.block_hashes, [], 0
    for i in range(len(hashes)):
        k, next_item = kv_cache_utils.generate_block_hash_extra_keys(request, i * BLOCK, (i + 1) * BLOCK, next_item)
        keys.append(k)
    stored = BlockStored(
        block_hashes=list(hashes), parent_block_hash=None, token_ids=tokens[: len(hashes) * BLOCK], block_size=BLOCK,
        lora_id=1 if lora else None, lora_name=lora, medium="GPU",
        extra_keys=kv_cache_utils.to_event_extra_keys(keys),
    )
    return msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=[stored])), [h.hex()[-16:] for h in hashes]


def main():
    kv_cache_utils.init_none_hash(sha256_cbor)
    out = []
    for name, c in CASES.items():
        tokens, items = flat(c["parts"])
        batch, hashes = events(tokens, items, c.get("salt"), c.get("lora"))
        out.append(
            {
                "name": name, "salt": c.get("salt", ""), "lora": c.get("lora", ""), "blocks": hashes,
                "batch": base64.b64encode(batch).decode(),
                "answer": answer(tokens, items, c.get("salt"), c.get("tensors")),
            }
        )
    file = pathlib.Path(__file__).with_name("cases.json")
    file.write_text("[\n" + ",\n".join(json.dumps(c) for c in out) + "\n]\n")


main()
