#!/usr/bin/env python3
"""First token of chats whose prompt is cached, with its text and with its tokens (--send-tokens): paired requests to one
vLLM or SGLang server, in random order within each pair. With --cold no prompt is cached. Prints a table of
docs/prompt-tokens.md. For SGLang, run it with the Python of SGLang: the tokens come from its transformers.

    scripts/bench_tokens_in.py http://127.0.0.1:8100 --lengths 1000,10000,60000,100000 --pairs 21
    PYTHON scripts/bench_tokens_in.py http://127.0.0.1:8100 --sglang MODEL_FOLDER
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import time
import urllib.parse

WORDS = """time people work year place hand part case week company system program question government number night point home
water room mother area money story fact month lot right study book eye job word business issue side kind head house service
friend father power hour game line end member law car city community name president team minute idea body information back
parent face others level office door health person art war history party result change morning reason research girl guy moment
air teacher force education""".split()


class Server:
    def __init__(self, url: str, sglang: str | None):
        at = urllib.parse.urlsplit(url)
        self.connection = http.client.HTTPConnection(at.hostname, at.port, timeout=900)
        self.tokenizer = None
        if sglang:
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(sglang)

    def post(self, path: str, body: dict) -> http.client.HTTPResponse:
        self.connection.request("POST", path, json.dumps(body, separators=(",", ":")), {"Content-Type": "application/json"})
        response = self.connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"{path} answered {response.status}: {response.read(500)!r}")
        return response

    def tokens(self, messages: list) -> list[int]:
        if self.tokenizer:
            return self.tokenizer.encode(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        return json.load(self.post("/tokenize", {"messages": messages}))["tokens"]

    def with_tokens(self, messages: list, tokens: list[int]) -> dict:
        if self.tokenizer:
            return {"messages": messages, "input_ids": tokens}
        return {"messages": messages, "kv_transfer_params": {"prompt_token_ids": tokens}}

    def first_token(self, body: dict) -> tuple[float, str]:
        """Seconds to the event with the first token, and the whole answer without what names the request."""
        body = body | {"stream": True, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}
        began = time.perf_counter()
        response = self.post("/v1/chat/completions", body)
        first, text, ends = 0.0, "", []
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            opening = event["choices"] and event["choices"][0]["delta"].get("role")
            if not first and event["choices"] and not opening:
                first = time.perf_counter() - began
            for choice in event["choices"]:  # how many tokens an event has is chance
                text += choice["delta"].get("content") or ""
                ends.append(choice["finish_reason"])
            ends.append((event.get("usage") or {}).get("prompt_tokens"))
        return first, json.dumps([text, [end for end in ends if end is not None]])


def messages_of(random_: random.Random, tokens: int, server: Server) -> tuple[list, list[int]]:
    """A chat of about so many tokens, as turns of 500 words."""
    def make(words: int) -> list:
        text = [random_.choice(WORDS) for _ in range(words)]
        turns = [" ".join(text[i : i + 500]) for i in range(0, words, 500)]
        turns = turns if len(turns) % 2 else turns[:-1] + [turns[-1] + " ?", "Go on."]
        return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]

    chat = make(tokens * 24 // 25)
    return chat, server.tokens(chat)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("url", help="of a vLLM server, or of an SGLang server with --sglang")
    options.add_argument("--sglang", metavar="FOLDER", help="the server is SGLang and serves the model in that folder")
    options.add_argument("--lengths", default="1000,10000,60000,100000", help="of prompts, tokens")
    options.add_argument("--pairs", type=int, default=21)
    options.add_argument("--cold", action="store_true", help="give each request a salt of its own, so that its prompt is computed")
    args = options.parse_args()
    server, random_ = Server(args.url, args.sglang), random.Random(1)
    print("| prompt, tokens | text, ms | tokens, ms | difference |\n|---|---|---|---|", flush=True)
    for length in map(int, args.lengths.split(",")):
        chat, tokens = messages_of(random_, length, server)
        bodies = [{"messages": chat}, server.with_tokens(chat, tokens)]
        for body in bodies * 2:  # computes the prompt, warms both ways up
            server.first_token(body)
        took: list[list[float]] = [[], []]
        for _ in range(args.pairs):
            said = {}
            for way in random_.sample([0, 1], 2):
                salt = {"cache_salt": f"{random_.getrandbits(64):x}"} if args.cold else {}
                seconds, said[way] = server.first_token(bodies[way] | salt)
                took[way].append(1000 * seconds)
            if said[0] != said[1]:
                raise SystemExit(f"the answers differ:\n{said[0]}\n{said[1]}")
        text, ids = map(statistics.median, took)
        differences = statistics.median(100 * (b - a) / a for a, b in zip(*took))
        print(f"| {len(tokens):,} | {text:.1f} | {ids:.1f} | {differences:+.0f} % |", flush=True)


if __name__ == "__main__":
    main()
