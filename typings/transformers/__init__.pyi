"""The few names of transformers that the benches use: reading the library's own index takes pyright half a minute."""

from typing import Any

__version__: str

AutoModelForCausalLM: Any
AutoTokenizer: Any
