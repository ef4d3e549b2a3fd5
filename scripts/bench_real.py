#!/usr/bin/env python3
"""Benchmarks every policy with real engines: each serves the same chats on fresh CPU workers of vLLM or SGLang.

The workers' caches are small (60 blocks of 64 tokens): all together can hold the system prompts, a single one cannot. So
the choice of the worker decides whether a prompt is computed or found in the cache. The hit rate comes from the engines'
own counters (GET /metrics of every worker), not from the router. Each request has the hints of a client that knows how
many requests share its system prompt (x-prefix-* headers), which policy thompson uses.

--multi-turn sends conversations, the workload of SGLang's pull request 1934: groups of conversations share a long system
prompt, every turn repeats the previous messages with the engine's answers, and turns of different conversations
alternate. The printed bound is the maximum hit rate of this load with caches of this size.

  scripts/bench_real.py                                    all policies, about 2 minutes each
  scripts/bench_real.py --shared                           all on the same two workers, caches reset in between: 1 minute each
  scripts/bench_real.py --policies work,round-robin        two policies; NAME/approx, NAME/events: with that --prefix-source
  scripts/bench_real.py --engine sglang                    SGLang workers (make setup-sglang)
  scripts/bench_real.py --engine mocker                    simulated workers, which start at once: tests the script only
  scripts/bench_real.py --shared --multi-turn --policies cache-threshold,variance,kv,work,round-robin
  scripts/bench_real.py --urls URL,URL                     no router: in-script round robin between running workers
  scripts/bench_real.py --shared --policies work --binary old=FILE,new=FILE --runs 3
                                                           two builds of kvrouter in turn, and the medians of their runs;
                                                           --policies work@old,kv@new,work@new: each with one of them
  scripts/bench_real.py --shared --offload-gib 0.83        workers that keep evicted blocks in host memory
  scripts/bench_real.py --shared --form test/real/zoo/testdata/gemma3-wide.json --blocks 240
      --engine-args "--no-disable-hybrid-kv-cache-manager --max-model-len 3072"
                                                           a model with sliding windows and made-up weights

Only Python's standard library is needed. The exit code is 0 if every request was answered, for any hit rate.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path

from cache_bound import best_placement, hit_rate, make_requests

ROOT = Path(__file__).resolve().parent.parent
BLOCK_SIZE = 64  # tokens; kvrouter's default
LONGEST = 8192  # tokens that the default model takes; vLLM refuses to start with a longer --max-model-len
CHAT_TIMEOUT = 300  # seconds of silence after which a chat fails
PREFIX_SOURCE_POLICIES = ("cache-threshold", "variance")  # those with --prefix-source
PREFIX_SOURCES = ("approx", "events")

VOCABULARY = (
    "river stone market window garden letter bridge morning engine silver paper signal harbor forest copper "
    "winter report table village captain mirror season ladder orange doctor castle planet basket summer thread "
    "corner button valley rocket pencil island butter kitchen candle anchor feather meadow lantern bottle hammer "
    "ticket saddle circle tunnel marble violin pepper blanket turtle monkey wagon cotton shadow needle pocket "
    "carry build answer follow measure gather deliver repair explain compare record arrange protect collect "
    "narrow bright heavy quiet early broken simple distant yellow careful empty gentle recent hidden useful "
    "before after under between without around toward during against beside"
).split()


# --- the load --------------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """What one request showed. Times in seconds, counts in tokens."""

    error: str = ""
    first_chunk: float = 0.0
    prompt: int = 0
    cached: int = 0
    predicted: int | None = None  # None: no router in between
    worker: str = "?"
    text: str = ""
    messages: list = field(default_factory=list)  # what was asked


def make_prose(rng, words):
    """`words` words in sentences, every second one ending in a number: about 1.3 tokens a word for SmolLM2."""
    prose = []
    while len(prose) < words:
        sentence = [rng.choice(VOCABULARY) for _ in range(min(10, words - len(prose)))]
        if len(prose) % 20 == 0:
            sentence[-1] = str(rng.randrange(1000, 10000))
        sentence[0] = sentence[0].capitalize()
        sentence[-1] += "."
        prose += sentence
    return " ".join(prose)


@dataclass
class Turn:
    """One request of the load: the next question of a conversation."""

    prompt: int  # which system prompt
    conversation: int
    question: str


def make_load(args):
    """(system prompts, turns in their order): every system prompt equally often, shuffled; everything from the seed."""
    rng = random.Random(args.seed)
    systems = [make_prose(rng, args.words) for _ in range(args.prompts)]

    def question(number):
        asked = f"Question {number}: what of {rng.choice(VOCABULARY)} and {rng.choice(VOCABULARY)}?"
        return f"{asked} {make_prose(rng, args.question_words)}" if args.multi_turn else asked

    if not args.multi_turn:
        order = [i % args.prompts for i in range(args.requests)]
        rng.shuffle(order)
        return systems, [Turn(which, number, question(number)) for number, which in enumerate(order)]
    turns = []
    for _ in range(args.turns):  # one turn of every conversation per round, so that the turns of one are apart
        order = list(range(args.conversations))
        rng.shuffle(order)
        turns += [Turn(c % args.prompts, c, question(len(turns) + i)) for i, c in enumerate(order)]
    return systems, turns


def prefix_hints(which, requests, args):
    """Headers of a client that describe the requests with this system prompt."""
    return {
        "x-prefix-id": f"prompt-{which}",
        "x-prefix-total-requests": str(-(-requests // args.prompts)),
        "x-prefix-osl": str(args.max_tokens),
        "x-prefix-iat": "MEDIUM",
    }


def connect(url, timeout):
    parts = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname, parts.port, timeout=timeout)


def get(url, timeout=10):
    """GET url: (status, body text). Raises OSError or HTTPException without a valid response."""
    connection = connect(url, timeout)
    try:
        connection.request("GET", urllib.parse.urlsplit(url).path or "/")
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def chat(url, model, messages, max_tokens, hints):
    """One streamed chat on a connection of its own, with those headers."""
    answer = Answer(messages=messages)
    body = json.dumps({
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    })
    connection = connect(url, CHAT_TIMEOUT)
    usage, done = {}, False
    try:
        started = time.monotonic()
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json", **hints})
        response = connection.getresponse()
        if response.status != 200:
            answer.error = f"HTTP {response.status}: {response.read(300).decode(errors='replace')}"
            return answer
        answer.worker = response.getheader("x-kvrouter-worker-id", "?")
        overlap = response.getheader("x-kvrouter-overlap-tokens")
        answer.predicted = int(overlap) if overlap else None
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                done = True
                continue
            chunk = json.loads(data)
            if chunk.get("error"):
                answer.error = f"in the stream: {chunk['error']}"
                return answer
            if chunk.get("choices") and not answer.first_chunk:
                answer.first_chunk = time.monotonic() - started
            for choice in chunk.get("choices") or ():
                answer.text += (choice.get("delta") or {}).get("content") or ""
            usage = chunk.get("usage") or usage
        if not done or not usage:
            answer.error = "the stream ended early" if not done else "the answer has no usage"
        answer.prompt = usage.get("prompt_tokens", 0)
        answer.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    except (OSError, http.client.HTTPException, ValueError) as problem:
        answer.error = f"{type(problem).__name__}: {problem}"
    finally:
        connection.close()
    return answer


def run_load(targets, model, load, args, hints=prefix_hints):
    """All turns at args.concurrency, in order, each after the answer to the one before of its conversation; request i to
    targets[i mod n], with the headers that hints returns: (answers, seconds)."""
    systems, turns = load
    answers = [Answer(error="not sent")] * len(turns)
    numbers = iter(range(len(turns)))
    lock = threading.Lock()  # guards numbers and running
    running = {}  # conversation: event set when its latest turn has ended
    said = {}  # conversation: all its messages; used only by the thread of its turn

    def client():
        while True:
            with lock:
                number = next(numbers, None)
                if number is None:
                    return
                turn = turns[number]
                before, ended = running.get(turn.conversation), threading.Event()
                running[turn.conversation] = ended
            try:
                if before and not before.wait(2 * CHAT_TIMEOUT):
                    answers[number] = Answer(error="the previous turn did not end")
                    continue
                messages = said.get(turn.conversation) or [{"role": "system", "content": systems[turn.prompt]}]
                messages = [*messages, {"role": "user", "content": turn.question}]
                answer = chat(targets[number % len(targets)], model, messages, args.max_tokens, hints(turn.prompt, len(turns), args))
                if len(targets) > 1:
                    answer.worker = str(number % len(targets))
                answers[number] = answer
                said[turn.conversation] = [*messages, {"role": "assistant", "content": answer.text}]
            finally:
                ended.set()

    started = time.monotonic()
    clients = [threading.Thread(target=client, daemon=True) for _ in range(args.concurrency)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    return answers, time.monotonic() - started


# --- the engines' own counters ---------------------------------------------------------------------------------------


# An engine's counters of prompt tokens that were found in its cache and the tiers below it, and of all prompt tokens.
COUNTERS = {
    "vllm": (("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total"), "vllm:prefix_cache_queries_total"),
    "sglang": (("sglang:cached_tokens_total",), "sglang:prompt_tokens_total"),
}
COUNTERS["mocker"] = COUNTERS["vllm"]  # --mock api=vllm


def prefix_cache_counters(worker_url, engine):
    """(hits, queries) in tokens since the engine's start, summed over its label sets. SGLang shows a counter once
    it is above zero."""
    status, text = get(worker_url + "/metrics")
    if status != 200:
        raise RuntimeError(f"GET {worker_url}/metrics answered {status}")
    hits, queries = COUNTERS[engine]
    sums = dict.fromkeys((*hits, queries), 0.0)
    for line in text.splitlines():
        name = line.split("{", 1)[0].split(" ", 1)[0]
        if name in sums:
            sums[name] += float(line.rsplit(" ", 1)[1])
    return sum(sums[name] for name in hits), sums[queries]


def all_counters(worker_urls, engine):
    pairs = [prefix_cache_counters(url, engine) for url in worker_urls]
    return sum(p[0] for p in pairs), sum(p[1] for p in pairs)


# --- a router of our own ---------------------------------------------------------------------------------------------


def free_ports(count):
    """The first of `count` neighbouring ports that are free now, in a range that outgoing connections do not use."""
    for base in random.SystemRandom().sample(range(20000, 31000, 10), 200):
        sockets = []
        try:
            for port in range(base, base + count):
                s = socket.socket()
                sockets.append(s)
                s.bind(("127.0.0.1", port))
            return base
        except OSError:
            continue
        finally:
            for s in sockets:
                s.close()
    raise RuntimeError("found no free ports between 20000 and 31000")


class Router:
    """A kvrouter with its workers, or with those of another one, given as values of --worker. Use with `with`: leaving
    stops it and the workers that it started."""

    def __init__(self, binary, policy_flags, args, log_path, attach=()):
        self.args, self.log_path = args, log_path
        ports = [free_ports(max(2, args.workers)) for _ in range(5)]
        while len(set(ports)) < len(ports):
            ports = [free_ports(max(2, args.workers)) for _ in range(5)]
        self.http = f"http://127.0.0.1:{ports[0]}"
        self.control = f"http://127.0.0.1:{ports[0] + 1}"
        self.load_port = ports[4]
        source = ["--engine", "none"] if attach else ["--engine", args.engine, "--num-workers", str(args.workers)]
        for worker in attach:
            source += ["--worker", worker]
        self.command = [
            str(binary), *source, *policy_flags, "--block-size", str(BLOCK_SIZE),
            "--seed", str(args.seed), "--http-port", str(ports[0]), "--router-port", str(ports[0] + 1),
            "--base-worker-port", str(ports[1]), "--base-kv-events-port", str(ports[2]),
            "--base-kv-replay-port", str(ports[3]), "--base-metrics-port", str(ports[4]),
        ]  # fmt: skip
        if args.model or attach and args.engine != "mocker":  # mock workers have no files: they tokenize the prompts
            self.command += ["--model", args.model or model_folder(attach[0].removeprefix("url=").split(",")[0], args.engine)]
        if attach or not args.shared:  # else it only starts the workers
            self.command += args.router_args
        if attach:
            return
        if args.offload_gib:
            self.command += ["--kv-offload-gib", str(args.offload_gib)]
        if args.engine == "mocker":
            self.command += ["--mock", f"num-gpu-blocks={args.blocks}"]
            return
        if args.engine == "sglang":
            self.command += ["--", "--max-total-tokens", str(args.blocks * BLOCK_SIZE)]
            return
        # vLLM keeps one block for itself, and refuses to start if the others cannot hold one longest request.
        longest = min((args.blocks - 1) * BLOCK_SIZE, LONGEST)
        self.command += ["--", "--num-gpu-blocks-override", str(args.blocks), "--max-model-len", str(longest), *args.engine_args]

    def __enter__(self):
        self.log = open(self.log_path, "w")
        environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "KVROUTER_DRAIN_DELAY": "0s"}  # the first has POST /reset_prefix_cache
        self.process = subprocess.Popen(self.command, cwd=ROOT, stdout=self.log, stderr=self.log, env=environment, start_new_session=True)
        try:
            self.workers = self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_):
        self.stop()

    def wait_until_ready(self):
        """The workers' URLs, once all of them and the router answer."""
        deadline = time.monotonic() + self.args.startup_timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"kvrouter ended with code {self.process.returncode}:\n{self.log_tail()}")
            try:
                status, text = get(self.control + "/workers")
                records = json.loads(text) if status == 200 else []
                self.records = sorted(records, key=lambda r: r["worker_id"])
                urls = [r["endpoint"] for r in self.records if r.get("endpoint")]
                urls = [url if "://" in url else "http://" + url for url in urls]
                if len(urls) == self.args.workers and all(get(url + "/health")[0] == 200 for url in urls) \
                        and get(self.http + "/ready")[0] == 200:  # fmt: skip
                    return urls
            except (OSError, http.client.HTTPException, ValueError):
                pass
            time.sleep(0.5)
        raise RuntimeError(f"kvrouter was not ready after {self.args.startup_timeout} s:\n{self.log_tail()}")

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                print("bench-real: kvrouter did not end within 60 s of SIGTERM; killing it", file=sys.stderr)
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self.log.close()

    def worker_flags(self):
        """Its workers as values of --worker for another kvrouter. SGLang servers report the other settings themselves."""
        if self.args.engine == "sglang":
            return [f"url={url},id={r['worker_id']}" for url, r in zip(self.workers, self.records)]
        return [
            f"url={url},id={r['worker_id']},kv-events={r['kv_events_endpoint']},replay={r['replay_endpoint']},"
            f"load=tcp://127.0.0.1:{self.load_port + i}"
            for i, (url, r) in enumerate(zip(self.workers, self.records))
        ]

    def empty_caches(self):
        """Resets the workers' prefix caches. An engine reports a reset with its next step only, so a short chat follows:
        otherwise the first predictions would use the old cache."""
        path = "/flush_cache" if self.args.engine == "sglang" else "/reset_prefix_cache?reset_external=true"
        for url in self.workers:
            connection = connect(url, timeout=30)
            connection.request("POST", path)
            status = connection.getresponse().status
            connection.close()
            if status != 200:
                raise RuntimeError(f"POST {url}{path} answered {status}")
            step = chat(url, first_model(url)["id"], [{"role": "user", "content": "Hello"}], 1, {})
            if step.error:
                raise RuntimeError(f"{url} after {path}: {step.error}")

    def ping(self):
        """Raises if ping.sh fails."""
        done = subprocess.run([ROOT / "ping.sh"], env={**os.environ, "KVROUTER_URL": self.http}, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"ping.sh: {done.stdout}{done.stderr}")

    def log_tail(self):
        return "\n".join(Path(self.log_path).read_text(errors="replace").splitlines()[-15:])


# --- the report ------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    name: str
    hits: float
    queries: float
    answers: list
    seconds: float

    def errors(self):
        return [a.error for a in self.answers if a.error]

    def row(self):
        """The table's cells for this run, below LABELS."""
        good = [a for a in self.answers if not a.error]
        times = sorted(a.first_chunk * 1000 for a in good) or [0.0]
        predicted = [a for a in good if a.predicted is not None]
        by_worker = {}
        for a in good:
            by_worker[a.worker] = by_worker.get(a.worker, 0) + 1
        return [
            self.name,
            f"{self.hits / self.queries:.3f}" if self.queries else "n/a",
            f"{self.hits:.0f} / {self.queries:.0f}",
            f"{statistics.mean(times):.0f}",
            f"{percentile(times, 50):.0f}",
            f"{percentile(times, 90):.0f}",
            f"{self.seconds:.1f}",
            ", ".join(f"{w}: {n}" for w, n in sorted(by_worker.items())),
            f"{sum(a.cached for a in good)}",
            f"{sum(a.predicted for a in predicted)}" if predicted else "n/a",
            f"{sum(a.predicted == a.cached for a in predicted)} of {len(predicted)}" if predicted else "n/a",
            f"{len(self.errors())} of {len(self.answers)}",
        ]


# Hits are tokens from the engines' own counters, cached tokens are from the answers' usage, predicted tokens are from the
# router; exact is the number of requests for which predicted and cached tokens are equal.
LABELS = ["policy", "hit rate", "hit / asked", "TTFT mean, ms", "p50", "p90", "run, s", "requests by worker", "cached", "predicted", "exact", "errors"]


def percentile(ordered, percent):
    """Nearest-rank percentile of an ascending list."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def print_table(results):
    print_rows([LABELS, *(r.row() for r in results)])


def print_medians(results):
    """Per policy and binary the medians of its runs."""
    runs = {}
    for r in results:
        runs.setdefault(r.name, []).append(r)
    rows = [["policy", "hit rate", "least and most", "TTFT mean, ms", "least and most", "exact"]]
    for name, of in runs.items():
        rates = [r.hits / max(1, r.queries) for r in of]
        means = [statistics.mean([a.first_chunk * 1000 for a in r.answers if not a.error] or [0]) for r in of]
        known = [a for r in of for a in r.answers if not a.error and a.predicted is not None]
        rows.append([
            name, f"{statistics.median(rates):.3f}", f"{min(rates):.3f} to {max(rates):.3f}",
            f"{statistics.median(means):.0f}", f"{min(means):.0f} to {max(means):.0f}",
            f"{sum(a.predicted == a.cached for a in known)} of {len(known)}",
        ])  # fmt: skip
    print_rows(rows)


def print_rows(rows):
    """The first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for number, row in enumerate(rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")


# --- main ------------------------------------------------------------------------------------------------------------


def first_model(url):
    """The entry of the first model in /v1/models."""
    status, text = get(url + "/v1/models")
    if status != 200:
        raise RuntimeError(f"GET {url}/v1/models answered {status}")
    return json.loads(text)["data"][0]


def model_folder(url, engine):
    """Where a worker has its model's files. SGLang's list of models has its served name only."""
    if engine == "vllm":
        return first_model(url)["root"]
    return json.loads(get(url + "/model_info")[1])["model_path"]


def measure(name, targets, workers, load, args):
    """The load against `targets`, between two readings of the workers' counters."""
    model = first_model(targets[0])["id"]
    before = all_counters(workers, args.engine)
    answers, seconds = run_load(targets, model, load, args)
    after = all_counters(workers, args.engine)
    result = Result(name, after[0] - before[0], after[1] - before[1], answers, seconds)
    for error in sorted(set(result.errors()))[:5]:
        print(f"bench-real: {name}: {error}", file=sys.stderr)
    return result


def tokenize(url, model, messages):
    """A chat's prompt tokens, from the router's /tokenize."""
    connection = connect(url, CHAT_TIMEOUT)
    try:
        connection.request("POST", "/tokenize", json.dumps({"model": model, "messages": messages}), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        if response.status != 200:
            raise RuntimeError(f"POST {url}/tokenize answered {response.status}: {text[:300]}")
        return json.loads(text)["tokens"]
    finally:
        connection.close()


def bound(url, turns, answers, args):
    """The maximum hit rate of the workers' caches for the load with these answers, as a line; or why it is unknown."""
    try:
        model = first_model(url)["id"]
        served = [(t.prompt, t.conversation, tokenize(url, model, a.messages)) for t, a in zip(turns, answers) if not a.error]
    except (RuntimeError, OSError, http.client.HTTPException, LookupError, TypeError, ValueError) as problem:
        return f"bound: unknown, the prompts could not be tokenized: {type(problem).__name__}: {problem}"
    if not served:
        return "bound: unknown, no request was answered"
    requests = make_requests(served, BLOCK_SIZE, args.max_tokens)
    blocks = args.blocks - (args.engine == "vllm")  # it keeps one for itself
    repeated = hit_rate(requests, [0] * len(requests), BLOCK_SIZE, None)
    placed = best_placement(requests, args.workers, BLOCK_SIZE, blocks, args.seed)
    in_turn = hit_rate(requests, [i % args.workers for i in range(len(requests))], BLOCK_SIZE, blocks)
    return (f"bound: of {sum(r.tokens for r in requests)} prompt tokens {repeated:.3f} repeat earlier ones in full blocks. One request at a time, "
            f"{args.workers} caches of {blocks} blocks find {placed:.3f} with the best worker found for each system prompt and {in_turn:.3f} by round robin"
            + (f": {placed / in_turn:.2f} times" if in_turn else ""))  # fmt: skip


def build_router(out):
    binary = out / "kvrouter"
    subprocess.run(["go", "build", "-o", str(binary), "."], cwd=ROOT, check=True)
    return binary


def binaries(args, out):
    """(name, path) of every kvrouter to measure; the name is empty if there is only one."""
    named = [part.rpartition("=") for part in args.binary.split(",")] if args.binary else []
    found = [(name if len(named) > 1 else "", Path(path).resolve()) for name, _, path in named]
    return found or [("", build_router(out))]


def make_model(args, out):
    """A model folder for --form: that config.json, the test model's tokenizer, and no weights."""
    tokenizer = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrouter" / "smollm2-135m-instruct"
    folder = out / "model"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(args.form, folder / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(tokenizer / name, folder)
    return folder


def policy_names(binary):
    """The policies of a kvrouter, from its error message for an unknown policy."""
    refused = subprocess.run([binary, "simulate", "--trace=none", "--concurrency=1", "--policy=?"], capture_output=True, text=True)
    names = re.search(r"choose one of \[(.*?)\]", refused.stderr)
    if not names:
        raise RuntimeError(f"{binary} does not list its policies: {refused.stderr.strip()}")
    return names[1].split()


def policy_variants(name):
    """(label, flags beside --policy) of every way in which a policy is measured."""
    if name in PREFIX_SOURCE_POLICIES:
        return [(f"{name}/{source}", ["--prefix-source", source]) for source in PREFIX_SOURCES]
    return [(name, [])]


def policy_runs(policies, routers):
    """(label, flags, binary's name, binary) of every run that --policies asks for; empty: all."""
    known = policy_names(routers[-1][1])
    for wanted in policies.split(",") if policies else known:
        wanted, _, binary = wanted.partition("@")
        name, _, source = wanted.partition("/")
        runs = [run for run in policy_variants(name) if not source or run[0] == wanted]
        if name not in known or not runs:
            raise RuntimeError(f"--policies {wanted}: choose among {', '.join(known)}; "
                               f"{' and '.join(PREFIX_SOURCE_POLICIES)} also with {' or '.join('/' + s for s in PREFIX_SOURCES)}")  # fmt: skip
        chosen = [r for r in routers if binary in ("", r[0])]
        if not chosen:
            raise RuntimeError(f"--policies ...@{binary}: --binary has no such name")
        for label, flags in runs:
            for router in chosen:
                yield label, ["--policy", name, *flags], *router


def at_least_one(parser, args, *names):
    """Refuses arguments of these names below 1."""
    for name in names:
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="vllm", choices=("vllm", "sglang", "mocker"), help="engine of the workers (default %(default)s)")
    parser.add_argument("--policies", default="", metavar="A,B", help="kvrouter policies, one run each (default: all); NAME@BINARY: with that one of --binary only")
    parser.add_argument("--urls", default="", metavar="URL,URL", help="measure these running workers with in-script round robin instead")
    parser.add_argument("--binary", default="", metavar="FILE", help="path of a kvrouter binary, or NAME=FILE,NAME=FILE: several in turn (default: build it)")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="runs of each policy and binary, in turn; the table has their medians (default %(default)s)")
    parser.add_argument("--model", default="", metavar="DIR", help="model for kvrouter (default: kvrouter's default)")
    parser.add_argument("--form", default="", metavar="FILE", help="config.json of a model with made-up weights, instead of --model")
    parser.add_argument("--engine-args", type=shlex.split, default=[], metavar="ARGS", help="additional arguments of vLLM, in one string")
    parser.add_argument("--shared", action="store_true", help="use the same workers for all runs, with caches reset before each")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="number of workers (default %(default)s)")
    parser.add_argument("--blocks", type=int, default=60, metavar="N", help="KV blocks of 64 tokens per worker (default %(default)s)")
    parser.add_argument("--offload-gib", type=float, default=0, metavar="G", help="host memory below each worker's cache, GiB (kvrouter's --kv-offload-gib; default none)")
    parser.add_argument("--multi-turn", action="store_true", help="send conversations of several turns")
    parser.add_argument("--prompts", "--groups", type=int, metavar="N", help="number of system prompts (default 12; 10 with --multi-turn)")
    parser.add_argument("--words", type=int, default=400, metavar="N", help="words per system prompt (default %(default)s)")
    parser.add_argument("--requests", type=int, default=120, metavar="N", help="number of requests without --multi-turn (default %(default)s)")
    parser.add_argument("--conversations", type=int, default=20, metavar="N", help="number of conversations (default %(default)s)")
    parser.add_argument("--turns", type=int, default=4, metavar="N", help="turns per conversation (default %(default)s)")
    parser.add_argument("--question-words", type=int, default=20, metavar="N", help="words added to the question of each turn (default %(default)s)")
    parser.add_argument("--concurrency", type=int, default=4, metavar="N", help="in-flight requests (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=8, metavar="N", help="output length, tokens (default %(default)s)")
    parser.add_argument("--seed", type=int, default=42, metavar="N", help="seed of prompts, order and router (default %(default)s)")
    parser.add_argument("--startup-timeout", type=float, default=300, metavar="S", help="maximum start time of router and workers, seconds (default %(default)g)")
    parser.add_argument("router_args", nargs="*", metavar="-- FLAG", help="additional flags of kvrouter")
    args = parser.parse_args()
    if args.prompts is None:
        args.prompts = 10 if args.multi_turn else 12
    at_least_one(parser, args, "workers", "blocks", "prompts", "words", "requests", "conversations", "turns", "question_words", "concurrency", "max_tokens", "runs")
    if args.blocks < 2:
        parser.error("--blocks 1: must be at least 2, because an engine reserves one")
    return args


def main():
    args = parse_arguments()
    load = make_load(args)
    what = f"{args.conversations} conversations of {args.turns} turns" if args.multi_turn else f"{args.requests} chats"
    print(f"{what} at concurrency {args.concurrency}: {args.prompts} system prompts of {args.words} words, "
          f"{args.max_tokens} tokens out, seed {args.seed}", flush=True)  # fmt: skip
    results = []
    try:
        measure_all(load, args, results)
    finally:  # report the measurements before the failure too
        if results:
            print()
            print_table(results)
            if args.runs > 1:
                print(f"\nMedians of {args.runs} runs\n")
                print_medians(results)
    return 1 if any(result.errors() for result in results) else 0


def measure_all(load, args, results):
    """Appends a Result for every requested run."""
    if args.urls:
        urls = [url.rstrip("/") for url in args.urls.split(",")]
        results.append(measure("in-script round robin", urls, urls, load, args))
    else:
        out = ROOT / "out" / "bench-real"
        out.mkdir(parents=True, exist_ok=True)
        routers = binaries(args, out)
        if args.form:
            args.model = str(make_model(args, out))
            args.engine_args += ["--load-format", "dummy"]
        with contextlib.ExitStack() as until_end:
            owner = None
            if args.shared:
                print(f"starting {args.workers} workers of {args.blocks} blocks (about a minute; log {out / 'workers.log'})", flush=True)
                owner = until_end.enter_context(Router(routers[-1][1], ["--policy", "round-robin"], args, out / "workers.log"))
            for label, flags, name, binary in [run for _ in range(args.runs) for run in policy_runs(args.policies, routers)]:
                label = f"{label} ({name})" if name else label
                log_path = out / f"{re.sub('[^a-z0-9-]+', '-', label)}.log"
                print(f"{label}: starting kvrouter (log {log_path})", flush=True)
                if owner:
                    owner.empty_caches()
                with Router(binary, flags, args, log_path, owner.worker_flags() if owner else ()) as router:
                    print(f"{label}: sending", flush=True)
                    results.append(measure(label, [router.http], router.workers, load, args))
                    router.ping()
                    if len(results) == 1 and not args.form:
                        print(bound(router.http, load[1], results[0].answers, args), flush=True)


def run(main, name):
    """Ends the script by main, with the processes of its routers and workers, and with its problem on one line."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `with Router` ends its processes
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except (RuntimeError, OSError, subprocess.CalledProcessError) as problem:
        sys.exit(f"{name}: {problem}")


if __name__ == "__main__":
    run(main, "bench-real")
