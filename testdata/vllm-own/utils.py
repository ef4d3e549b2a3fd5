"""Replaces vLLM's tests/utils.py: a server is a kvrouter with one vLLM CPU worker, and `through_router` says which of the
two the tests ask."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import openai
import pytest

MODEL = os.environ["VLLM_OWN_MODEL"]  # folder
ROUTER = os.environ["VLLM_OWN_ROUTER"]  # program
LOGS = Path(os.environ["VLLM_OWN_LOGS"])
START_LIMIT = 400  # s

VLLM_PATH = Path(__file__).parent.parent
ROCM_EXTRA_ARGS, ROCM_ENV_OVERRIDES = [], {}

# Arguments that kvrouter sets itself, and those that the small model or a CPU does not take, by their number of values.
DROPPED = {
    "--attention-backend": 1, "--block-size": 1, "--dtype": 1, "--gpu-memory-utilization": 1, "--hf-overrides": 1, "--host": 1,
    "--max-cpu-loras": 1, "--max-lora-rank": 1, "--max-loras": 1, "--model-impl": 1, "--port": 1, "--tensor-parallel-size": 1,
    "--enable-lora": 0, "--enable-scale-out": 0, "--lora-modules": 99, "--served-model-name": 99,
}  # fmt: skip
LONGEST = 8192  # tokens, of the small model


def split(args):
    """The arguments for vLLM, and the names of the model among them."""
    kept, names, args = [], [], [str(arg) for arg in args]
    while args:
        flag = args.pop(0)
        values = []
        while args and not args[0].startswith("--") and len(values) < DROPPED.get(flag, 99):
            values.append(args.pop(0))
        if flag == "--served-model-name":
            names = values
        if flag == "--max-model-len":
            values = [str(min(int(values[0]), LONGEST))]
        if flag not in DROPPED:
            kept += [flag, *values]
    return kept, names


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return [str(port) for port in ports]


class Router:
    """A started kvrouter and its worker."""

    def __init__(self, model, args, env):
        args, names = split(args)
        self.http, control, self.worker, events, replay, load = free_ports(6)
        log = LOGS / f"{self.http}.log"
        key = (env or {}).get("VLLM_API_KEY") or (args[args.index("--api-key") + 1] if "--api-key" in args else "")
        with open(log, "w") as file:
            self.process = subprocess.Popen(
                [
                    ROUTER, "--num-workers", "1", "--python", sys.executable, "--model", MODEL,
                    "--served-model-name", (names or [model])[0], "--allow-engine-admin", "--drain-delay", "0s",
                    "--http-port", self.http, "--router-port", control, "--base-worker-port", self.worker,
                    "--base-kv-events-port", events, "--base-kv-replay-port", replay, "--base-metrics-port", load, "--", *args,
                ],
                env={**os.environ, **(env or {}), "KVROUTER_API_KEY": key}, stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + START_LIMIT
        while not self.ready():
            if self.process.poll() is not None or time.monotonic() > deadline or "worker 0 exited" in log.read_text():
                self.stop()
                raise RuntimeError(f"vLLM did not start: {log}")
            time.sleep(0.5)

    def ready(self):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/ready", timeout=5) as response:
                return json.load(response).get("schedulable_workers", 0) > 0
        except OSError:
            return False

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)


class RemoteOpenAIServer:
    DUMMY_API_KEY = "token-abc123"
    uds = None
    host = "127.0.0.1"
    show_hidden_metrics = False
    through_router = False
    idle = {}  # the last server that was left, by its arguments: the next test may want the same

    def __init__(self, model, vllm_serve_args, *, env_dict=None, **_):
        if "--uds" in vllm_serve_args:
            pytest.skip("kvrouter reaches workers by port")
        self.key = json.dumps([model, vllm_serve_args, env_dict])
        self.router = self.idle.pop(self.key, None)
        self.stop_idle()
        if not self.router:
            self.router = Router(model, vllm_serve_args, env_dict)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop_idle()
        self.idle[self.key] = self.router

    @classmethod
    def stop_idle(cls):
        while cls.idle:
            cls.idle.popitem()[1].stop()

    @property
    def port(self):
        return int(self.router.http if self.through_router else self.router.worker)

    @property
    def url_root(self):
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts):
        return self.url_root + "/" + "/".join(parts)

    def client(self, kind, base, settings):
        return kind(**{"timeout": 600, "max_retries": 0, "base_url": base, "api_key": self.DUMMY_API_KEY, **settings})

    def get_client(self, **settings):
        return self.client(openai.OpenAI, self.url_for("v1"), settings)

    def get_async_client(self, **settings):
        return self.client(openai.AsyncOpenAI, self.url_for("v1"), settings)

    def get_async_client_anthropic(self, **settings):
        import anthropic

        return self.client(anthropic.AsyncAnthropic, self.url_root, settings)


RemoteOpenAIServerCustom = RemoteOpenAIServer


class RemoteLaunchRenderServer:
    def __init__(self, *_, **__):
        pytest.skip("kvrouter starts no render servers")


def multi_gpu_test(**_):
    return pytest.mark.skip("needs GPUs")


multi_gpu_only = multi_gpu_test
requires_fp8 = pytest.mark.skip("needs fp8")


def create_new_process_for_each_test(*_, **__):
    return lambda test: test
