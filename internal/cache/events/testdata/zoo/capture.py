"""Makes captures of a real vLLM without a model: its EngineCore with scheduler, KV cache,
block hashes and KV events, over an executor that answers with random tokens. So forms
can be captured that need a GPU. Each is 60 requests that go on, branch, return and evict.

PYTHON capture.py FOLDER [FORM ...], with the Python of a vLLM for the CPU and, as
FOLDER/tokenizer, a model's tokenizer files. VLLM_TARGET_DEVICE=cpu has other builds take
the CPU. The captures are FOLDER/vllm-VERSION-engine-FORM.jsonl.gz.
"""

import base64
import gzip
import json
import os
import random
import shutil
import sys
from concurrent.futures import Future

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="1")

import msgspec
import torch
import vllm
import vllm.distributed.kv_events as kv_events
from vllm import LLM, SamplingParams
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker import worker_base

LENGTH = 2048
LLAMA = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, vocab_size=49152, max_position_embeddings=8192, dtype="bfloat16", tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
)
NEXT = dict(
    LLAMA, architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128,
    linear_num_key_heads=2, linear_num_value_heads=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64,
    layer_types=["linear_attention"] * 3 + ["full_attention"], full_attention_interval=4, num_nextn_predict_layers=1, mtp_num_hidden_layers=1,
)
EAGLE = dict(method="eagle", model="eagle", num_speculative_tokens=3)
MTP = dict(method="mtp", num_speculative_tokens=1)

# Layers, blocks of the cache, arguments of LLM. The last layers are the drafter's.
FORMS = {
    "mla": (["mla"] * 3, 100, {}),
    "gemma3": (["window 256"] * 5 + ["full"], 460, {}),
    "dense": (["window 256"] * 5 + ["full"], 460, dict(prefix_cache_retention_interval=None)),
    "interval": (["window 256"] * 5 + ["full"], 460, dict(prefix_cache_retention_interval=512)),
    "windows": (["window 256", "window 512", "full"], 240, {}),
    "wide": (["window 256"] * 5 + ["full 4"], 400, {}),  # twice as many heads: the windows' blocks are longer
    "mamba": (["state"] * 3 + ["full"], 130, dict(model="next")),
    "mamba-512": (["state 512", "full"], 110, dict(model="next")),  # found at places within a state's block, too
    "mamba-only": (["state"] * 2, 40, dict(model="next")),
    "sliding-dense": (["window 256"] * 4, 110, dict(prefix_cache_retention_interval=32)),
    "sliding-interval": (["window 256"] * 4, 200, dict(prefix_cache_retention_interval=512)),
    "chunked-prefill": (["window 256"] * 5 + ["full"], 460, dict(max_num_batched_tokens=256, max_num_seqs=4)),
    "eagle": (["full"] * 5, 100, dict(speculative_config=EAGLE)),
    "eagle-gemma3": (["window 256"] * 3 + ["full"] * 2, 330, dict(speculative_config=EAGLE)),
    "mtp-mamba": (["state"] * 3 + ["full"] * 2, 150, dict(model="next", speculative_config=MTP)),
}

dice = random.Random()
batches = []


class Publisher:
    """Stands in for the ZMQ publisher."""

    def __init__(self):
        self.seq, self.encoder = 0, msgspec.msgpack.Encoder()

    def publish(self, batch):
        batch.data_parallel_rank = 0
        payload = base64.b64encode(self.encoder.encode(batch)).decode()
        batches.append(dict(kind="event", seq=self.seq, payload=payload))
        self.seq += 1

    def shutdown(self):
        pass


def specs(config, layers):
    """The KV cache of each layer."""
    block = config.cache_config.block_size
    heads = dict(block_size=block, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    page = kv.FullAttentionSpec(**heads).page_size_bytes
    drafts = config.speculative_config.num_speculative_tokens if config.speculative_config else 0
    made = {}
    for i, layer in enumerate(layers):
        kind, _, number = layer.partition(" ")
        if kind == "full":
            spec = kv.FullAttentionSpec(**dict(heads, num_kv_heads=int(number or 2)))
        elif kind == "window":
            spec = kv.SlidingWindowSpec(**heads, sliding_window=int(number))
        elif kind == "mla":
            spec = kv.MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
        else:
            spec = kv.MambaSpec(block_size=int(number or block), shapes=((2, 64), (4, 64)), dtypes=(torch.bfloat16,) * 2, page_size_padded=page, mamba_cache_mode="align", num_speculative_blocks=drafts)
        made[f"model.layers.{i}.attn"] = spec
    return made


class NoModel(Executor):
    """An executor that samples random tokens, and accepts a random number of drafts."""

    layers = []
    supported_tasks = ("generate",)

    @classmethod
    def supports_async_scheduling(cls):
        return False

    def _init_executor(self):
        self.length, self.computed, self.sampled = {}, {}, []

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, non_block=False, **more):
        answer = None
        if method == "get_kv_cache_spec":
            answer = specs(self.vllm_config, self.layers)
        elif method == "get_supported_kv_cache_layouts":
            answer = [layout.name for layout in kv.KVCacheLayout]
        elif method == "set_kv_cache_layout":
            worker_base.record_kv_cache_layout(self.vllm_config.cache_config, args[0])
        elif method == "determine_available_memory":
            answer = 1 << 34
        return self.answer([answer], non_block)

    def answer(self, value, non_block):
        if not non_block:
            return value
        future = Future()
        future.set_result(value)
        return future

    def check_health(self):
        pass

    def shutdown(self):
        pass

    def compile_or_warm_up_model(self):
        pass

    def initialize_from_config(self, configs):
        pass

    def execute_model(self, step, non_block=False):
        for new in step.scheduled_new_reqs:
            self.length[new.req_id], self.computed[new.req_id] = len(new.prompt_token_ids), new.num_computed_tokens
        self.computed.update(zip(step.scheduled_cached_reqs.req_ids, step.scheduled_cached_reqs.num_computed_tokens))
        ids, answers, self.sampled = list(step.num_scheduled_tokens), [], []
        for request in ids:
            drafts = step.scheduled_spec_decode_tokens.get(request, [])
            if self.computed[request] + step.num_scheduled_tokens[request] - len(drafts) < self.length[request]:
                answers.append([])  # a chunk of the prompt
                continue
            answers.append(list(drafts[: dice.randint(0, len(drafts))]) + [token()])
            self.length[request] += len(answers[-1])
            self.sampled.append(request)
        output = ModelRunnerOutput(req_ids=ids, req_id_to_index={r: i for i, r in enumerate(ids)}, sampled_token_ids=answers)
        return self.answer(output, non_block)

    def take_draft_token_ids(self):
        speculative = self.vllm_config.speculative_config
        if speculative is None:
            return None
        return DraftTokenIds(list(self.sampled), [[token() for _ in range(speculative.num_speculative_tokens)] for _ in self.sampled])


def token():
    return dice.randint(100, 163)  # few, for small files


def text(least, most):
    return [token() for _ in range(dice.randint(least, most))]


def prompts():
    """Yields the prompts of a form; the caller adds the answer to each."""
    systems, talks = [text(300, 600) for _ in range(5)], []
    for _ in range(60):
        chance = dice.random()
        if talks and chance < 0.45:
            talk = dice.choice(talks)
        elif talks and chance < 0.65:
            other = dice.choice(talks)
            talk = other[: dice.randint(1, len(other))]
            talks.append(talk)
        elif talks and chance < 0.7:
            talk = list(dice.choice(talks))
            talks.append(talk)
        else:
            talk = list(dice.choice(systems))
            talks.append(talk)
        del talks[:-12]
        if not 0.65 <= chance < 0.7:
            talk.extend(text(1, 200))
        del talk[LENGTH - 250 :]
        yield talk
        if dice.random() < 0.2:  # the client changes the answer
            del talk[-dice.randint(1, 20) :]
            talk.extend(text(1, 20))


def capture(folder, form):
    dice.seed(form)
    NoModel.layers, blocks, arguments = FORMS[form]
    arguments = dict(dict(model="llama"), **arguments)
    arguments["model"] = os.path.join(folder, "models", arguments["model"])
    if arguments.get("speculative_config", {}).get("model"):
        arguments["speculative_config"] = dict(arguments["speculative_config"], model=os.path.join(folder, "models", "llama"))
    llm = LLM(
        enforce_eager=True, load_format="dummy", max_model_len=LENGTH, num_gpu_blocks_override=blocks, block_size=32, kv_cache_memory_bytes=1 << 28,
        enable_prefix_caching=True, disable_hybrid_kv_cache_manager=False, async_scheduling=False, distributed_executor_backend=NoModel, seed=0,
        kv_events_config=dict(enable_kv_cache_events=True, publisher="zmq", endpoint="ipc://unused"), **arguments,
    )
    dice.seed(form)
    path = os.path.join(folder, f"vllm-{vllm.__version__}-engine-{form}.jsonl.gz")
    with gzip.GzipFile(path, "wb", 9, mtime=0) as out:
        write = lambda line: out.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        for prompt in prompts():
            sampling = SamplingParams(max_tokens=dice.randint(1, 60), ignore_eos=True, detokenize=False)
            result = llm.generate({"prompt_token_ids": list(prompt)}, sampling, use_tqdm=False)[0]
            for batch in batches:
                write(batch)
            batches.clear()
            write(dict(kind="request", prompt_token_ids=prompt, usage=dict(prompt_tokens_details=dict(cached_tokens=result.num_cached_tokens))))
            prompt.extend(result.outputs[0].token_ids)
    print(path, os.path.getsize(path), "bytes", flush=True)


def main():
    folder, forms = os.path.abspath(sys.argv[1]), sys.argv[2:] or list(FORMS)
    for name, config in dict(llama=LLAMA, next=NEXT).items():
        model = os.path.join(folder, "models", name)
        shutil.copytree(os.path.join(folder, "tokenizer"), model, dirs_exist_ok=True)
        with open(os.path.join(model, "config.json"), "w") as out:
            json.dump(config, out)
    kv_events.EventPublisherFactory.create = classmethod(lambda cls, *args, **kwargs: Publisher())
    for form in forms:
        child = os.fork()  # an engine of its own, without importing vLLM again
        if child == 0:
            capture(folder, form)
            sys.stdout.flush()
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            sys.exit(f"{form} failed")


if __name__ == "__main__":
    main()
