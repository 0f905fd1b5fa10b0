"""`python -m bench.memory_8b FOLDER`: peak memory of a random 4-bit model in Llama 3 8B's shape, loaded and asked.

The folder (4.5 GB) is written shard by shard if it is not there, with smollm2's tokenizer. Loading runs in a process of its own,
whose peak is printed.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

LAYERS, HIDDEN, INNER, KEYS, VOCABULARY, GROUP = 32, 4096, 14336, 1024, 128256, 64
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
    "intermediate_size": INNER, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY, "rope_theta": 500000.0, "tie_word_embeddings": False, "max_position_embeddings": 8192,
    "eos_token_id": 2, "quantization": {"group_size": GROUP, "bits": 4},
}  # fmt: skip
PROJECTIONS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KEYS, HIDDEN), "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}  # fmt: skip
PROMPT = "Say something. " * 20


def main() -> None:
    """Make the folder, or load it and ask."""
    folder = Path(sys.argv[1])
    if "--load" in sys.argv:
        load_and_ask(folder)
        return
    if not (folder / "model.safetensors.index.json").exists():
        write(folder)
    subprocess.run([sys.executable, "-m", "bench.memory_8b", str(folder), "--load"], check=True)


def load_and_ask(folder: Path) -> None:
    """Print the peak of this process after loading, and after a prompt and some tokens."""
    from weft.ipc.limits import Sampling
    from weft.llm import LLM

    model = LLM(str(folder))
    print(f"loaded: {model.loaded.weights_bytes / 1e9:.2f} GB of weights, peak {peak_gb():.2f} GB", flush=True)
    [result] = model.generate([PROMPT], Sampling(max_tokens=8, temperature=0.0, ignore_eos=True))
    print(f"{len(result.token_ids)} tokens: peak {peak_gb():.2f} GB", flush=True)


def peak_gb() -> float:
    """Return the most memory this process has had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def write(folder: Path) -> None:
    """Write the shards, a layer each, and their index."""
    from weft.model.resolve import resolve

    folder.mkdir(parents=True, exist_ok=True)
    for file in resolve("smollm2").glob("*token*"):
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    random, places = np.random.default_rng(0), {}
    shards = {f"model-{layer:02}": layer_tensors(layer) for layer in range(LAYERS)}
    shards["model-ends"] = {"model.norm": None, "model.embed_tokens": (VOCABULARY, HIDDEN), "lm_head": (VOCABULARY, HIDDEN)}
    for name, shapes in shards.items():
        tensors = {part: array for of, shape in shapes.items() for part, array in packed(random, of, shape).items()}
        save_file(tensors, folder / f"{name}.safetensors", {"format": "mlx"})
        places |= dict.fromkeys(tensors, f"{name}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def layer_tensors(layer: int) -> dict[str, tuple[int, int] | None]:
    """Return the names of a layer's parts with their shapes; a norm has none."""
    norms = {f"model.layers.{layer}.{name}": None for name in ("input_layernorm", "post_attention_layernorm")}
    return norms | {f"model.layers.{layer}.{name}": shape for name, shape in PROJECTIONS.items()}


def packed(random: np.random.Generator, name: str, shape: tuple[int, int] | None) -> dict[str, np.ndarray]:
    """Return the arrays of a part: codes of four bits, scales and biases around zero; or a norm's ones."""
    if shape is None:
        return {f"{name}.weight": np.ones(HIDDEN, np.float16)}
    rows, width = shape
    scales = np.full((rows, width // GROUP), 0.2 / width**0.5, np.float16)
    codes = np.frombuffer(random.bytes(rows * width // 2), np.uint32).reshape(rows, width // 8)
    return {f"{name}.weight": codes, f"{name}.scales": scales, f"{name}.biases": scales * np.float16(-7.5)}


if __name__ == "__main__":
    main()
