#!/usr/bin/env python3
"""Benchmarks LoRA adapters with real engines: how often workers load one, on how many workers each is, and first tokens.

Two vLLM CPU workers serve 8 adapters with made-up weights (random, of the form of the model), and have slots for 2 each
(--max-loras 2). Every adapter has its own system prompt. Adapters are drawn by Zipf's law.

vLLM's metrics do not count loads: `vllm:lora_requests_info` shows which adapters run. So loads are counted by vLLM's own
log, which has a line for each adapter that is moved into a slot. "Expected" are the loads and waits for a slot that the
router foresaw (kvrouter_adapter_requests_total).

  scripts/bench_adapters.py                                policies work, kv and round-robin: about 20 minutes
  scripts/bench_adapters.py --policies work --requests 200
  scripts/bench_adapters.py --engine mocker                simulated workers, which start at once: tests the script only

Only Python's standard library is needed. The exit code is 0 if every request was answered, whatever the times.
"""

from __future__ import annotations

import argparse
import array
import json
import math
import os
import random
import statistics
import struct
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import bench_real
from bench_real import ROOT, Router, all_counters, chat, get, make_prose, percentile, print_rows

ACTIVATION = "Activating LoRA"  # vllm/lora/model_manager.py, for each adapter that is moved into a slot


# --- adapters --------------------------------------------------------------------------------------------------------


def model_config(args):
    """The config.json of the model that the workers serve."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrouter" / "smollm2-135m-instruct"
    return json.loads(((Path(args.model) if args.model else cache) / "config.json").read_text())


def write_adapter(folder, config, rank, seed):
    """A LoRA adapter with random weights for the queries and values of a Llama model, in the form of PEFT."""
    hidden, head = config["hidden_size"], config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rng = random.Random(seed)
    some = array.array("f", [rng.gauss(0, 0.02) for _ in range(4096)])
    header, size = {}, 0
    parts = (("q_proj", config["num_attention_heads"]), ("v_proj", config["num_key_value_heads"]))
    for layer in range(config["num_hidden_layers"]):
        for part, heads in parts:
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            for side, shape in (("A", (rank, hidden)), ("B", (heads * head, rank))):
                bytes_ = 4 * shape[0] * shape[1]
                header[f"{name}.lora_{side}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": [size, size + bytes_]}
                size += bytes_
    names = json.dumps(header).encode()
    names += b" " * (-len(names) % 8)
    weights = some.tobytes() * math.ceil(size / (4 * len(some)))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(names)) + names + weights[:size])
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none",
    }))  # fmt: skip


def log_activations(out):
    """Has vLLM write its log of adapters into a file, which is returned: a line begins with the process id."""
    path, config = out / "adapters.log", out / "logging.json"
    path.write_text("")
    config.write_text(json.dumps({
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"process": {"format": "%(process)d %(message)s"}, "plain": {"format": "%(levelname)s %(asctime)s %(message)s"}},
        "handlers": {
            "adapters": {"class": "logging.FileHandler", "filename": str(path), "formatter": "process", "level": "DEBUG"},
            "out": {"class": "logging.StreamHandler", "stream": "ext://sys.stdout", "formatter": "plain", "level": "INFO"},
        },
        "loggers": {
            "vllm": {"handlers": ["out"], "level": "INFO", "propagate": False},
            "vllm.lora.model_manager": {"handlers": ["adapters"], "level": "DEBUG", "propagate": False},
        },
    }))  # fmt: skip
    os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(config)
    return path


def activations(path):
    """How many adapters have been moved into slots, by all workers."""
    return path.read_text().count(ACTIVATION)


# --- the load --------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    policy: str
    asked: list  # adapters, in the order of answers
    answers: list
    seconds: float
    loads: int | None  # by the engines' log; None: there is none
    expected: dict  # kvrouter_adapter_requests_total by result
    hits: float
    queries: float

    def row(self):
        good = [(name, a) for name, a in zip(self.asked, self.answers) if not a.error]
        times = sorted(1000 * a.first_chunk for _, a in good) or [0.0]
        places = {}
        for name, a in good:
            places.setdefault(name, set()).add(a.worker)
        thousand = 1000 / max(1, len(self.answers))
        return [
            self.policy, "n/a" if self.loads is None else f"{self.loads * thousand:.0f}", f"{self.expected.get('load', 0) * thousand:.0f}",
            f"{self.expected.get('wait', 0) * thousand:.0f}", f"{statistics.mean(len(p) for p in places.values()) if places else 0:.1f}",
            f"{self.hits / self.queries:.3f}" if self.queries else "n/a", f"{statistics.mean(times):.0f}", f"{percentile(times, 50):.0f}",
            f"{percentile(times, 99):.0f}", f"{self.seconds:.0f}", str(len(self.answers) - len(good)),
        ]  # fmt: skip


LABELS = ["policy", "loads per 1,000", "expected", "waits expected", "workers per adapter", "hit rate", "TTFT mean, ms", "p50", "p99", "run, s", "errors"]


def make_load(names, args):
    """(adapter, messages) of every request, in their order; everything from the seed."""
    rng = random.Random(args.seed)
    systems = {name: make_prose(rng, args.words) for name in names}
    weights = [1 / (i + 1) ** args.zipf for i in range(len(names))]
    return [
        (name, [{"role": "system", "content": systems[name]}, {"role": "user", "content": make_prose(rng, args.question_words)}])
        for name in rng.choices(names, weights, k=args.requests)
    ]


def run_load(url, load, args):
    """All requests at args.concurrency, in order: answers in the same order, and seconds."""
    answers, numbers, lock = [None] * len(load), iter(range(len(load))), threading.Lock()  # guards numbers

    def client():
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            name, messages = load[number]
            answers[number] = chat(url, name, messages, args.max_tokens, {})

    began = time.monotonic()
    clients = [threading.Thread(target=client, daemon=True) for _ in range(args.concurrency)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    return answers, time.monotonic() - began


def expected_requests(url):
    """kvrouter_adapter_requests_total by result, over all workers."""
    sums = {}
    for line in get(url + "/metrics")[1].splitlines():
        if line.startswith("kvrouter_adapter_requests_total{"):
            result = line.split('result="', 1)[1].split('"', 1)[0]
            sums[result] = sums.get(result, 0) + float(line.rsplit(" ", 1)[1])
    return sums


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="vllm", choices=("vllm", "mocker"), help="engine of the workers (default %(default)s)")
    parser.add_argument("--policies", default="work,kv,round-robin", metavar="A,B", help="kvrouter policies, one run each (default %(default)s)")
    parser.add_argument("--binary", default="", metavar="FILE", help="path of a kvrouter binary (default: build it)")
    parser.add_argument("--model", default="", metavar="DIR", help="folder of a Llama model for kvrouter (default: kvrouter's default)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="number of workers (default %(default)s)")
    parser.add_argument("--blocks", type=int, default=120, metavar="N", help="KV blocks of 64 tokens per worker (default %(default)s)")
    parser.add_argument("--adapters", type=int, default=8, metavar="N", help="number of adapters (default %(default)s)")
    parser.add_argument("--max-loras", type=int, default=2, metavar="N", help="slots for adapters of each worker (default %(default)s)")
    parser.add_argument("--rank", type=int, default=16, metavar="N", help="rank of the adapters: 8, 16, 32, 64 or more (default %(default)s)")
    parser.add_argument("--zipf", type=float, default=0.5, metavar="X", help="exponent of Zipf's law for the adapters; 0: all alike (default %(default)s)")
    parser.add_argument("--requests", type=int, default=1000, metavar="N", help="number of requests (default %(default)s)")
    parser.add_argument("--concurrency", type=int, default=6, metavar="N", help="in-flight requests (default %(default)s)")
    parser.add_argument("--words", type=int, default=150, metavar="N", help="words per system prompt (default %(default)s)")
    parser.add_argument("--question-words", type=int, default=15, metavar="N", help="words per question (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=16, metavar="N", help="output length, tokens (default %(default)s)")
    parser.add_argument("--seed", type=int, default=42, metavar="N", help="seed of prompts, order, weights and router (default %(default)s)")
    parser.add_argument("--startup-timeout", type=float, default=300, metavar="S", help="maximum start time of router and workers, seconds (default %(default)g)")
    parser.add_argument("router_args", nargs="*", metavar="-- FLAG", help="additional flags of kvrouter")
    args = parser.parse_args()
    bench_real.at_least_one(parser, args, "workers", "blocks", "adapters", "max_loras", "rank", "requests", "concurrency", "words", "question_words", "max_tokens")
    args.shared, args.offload_gib, args.engine_args = True, 0, []
    return args


def main():
    args = parse_arguments()
    out = ROOT / "out" / "bench-adapters"
    out.mkdir(parents=True, exist_ok=True)
    binary = Path(args.binary).resolve() if args.binary else bench_real.build_router(out)
    names = [f"adapter-{i}" for i in range(args.adapters)]
    log = None
    if args.engine == "vllm":
        config = model_config(args)
        for i, name in enumerate(names):
            write_adapter(out / name, config, args.rank, args.seed + i)
        log = log_activations(out)
        args.engine_args = ["--enable-lora", "--max-loras", str(args.max_loras), "--max-lora-rank", str(args.rank),
                            "--lora-modules", *(f"{name}={out / name}" for name in names)]  # fmt: skip
    owner = Router(binary, ["--policy", "round-robin"], args, out / "workers.log")
    if args.engine == "mocker":
        owner.command += ["--mock", "lora=" + ",".join(names), "--mock", f"max-loras={args.max_loras}"]
    load = make_load(names, args)
    print(f"{args.requests} chats at concurrency {args.concurrency} for {args.adapters} adapters over {args.workers} workers with slots for {args.max_loras}, "
          f"seed {args.seed}", flush=True)  # fmt: skip
    results = []
    try:
        with owner:
            for policy in args.policies.split(","):
                owner.empty_caches()
                with Router(binary, ["--policy", policy], args, out / f"{policy}.log", owner.worker_flags()) as router:
                    print(f"{policy}: sending", flush=True)
                    loads, before = activations(log) if log else 0, all_counters(router.workers, args.engine)
                    answers, seconds = run_load(router.http, load, args)
                    after = all_counters(router.workers, args.engine)
                    results.append(Result(policy, [name for name, _ in load], answers, seconds, activations(log) - loads if log else None,
                                          expected_requests(router.http), after[0] - before[0], after[1] - before[1]))  # fmt: skip
    finally:  # report the measurements before the failure too
        if results:
            print()
            print_rows([LABELS, *(r.row() for r in results)])
            for error in sorted({a.error for r in results for a in r.answers if a.error})[:5]:
                print(f"bench-adapters: {error}", file=sys.stderr)
    return 1 if any(a.error for r in results for a in r.answers) else 0


if __name__ == "__main__":
    bench_real.run(main, "bench-adapters")
