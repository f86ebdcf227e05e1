"""A model folder for the whole engine: a tiny Llama's config for dummy weights, a real tokenizer, a chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tests.fakes.bpe import BpeTokenizer

TEMPLATE = (
    "{% for m in messages %}<|bos|>{{ m.role }}\n{{ m.content }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)


def tiny_folder(path: Path) -> Path:
    """For Engine(model=str(path), load_format="dummy")."""
    tokenizer = BpeTokenizer()
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(tokenizer._backend.to_str())
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eos|>", "chat_template": TEMPLATE}))
    (path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": tokenizer.vocab_size,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
                "rope_theta": 10000.0,
                "torch_dtype": "float32",
                "tie_word_embeddings": True,
                "eos_token_id": tokenizer.stop_token_ids[0],
            }
        )
    )
    return path
