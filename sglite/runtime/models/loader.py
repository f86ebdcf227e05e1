"""Weights as tensors, under their Hugging Face names, one at a time.

Files are mapped, not read: a tensor's pages come in when it is used, and a parameter of the stored dtype may be the
mapped tensor itself. A model that copies (to fuse, cast or move to a device) holds about 64 MiB more than its weights.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from sglite.errors import ModelError
from sglite.runtime.models.sources import (
    DEFAULT_MODEL,
    GenerationDefaults,
    LoadFormat,
    ModelSource,
    resolve_model,
    weight_files,
)

__all__ = [
    "DEFAULT_MODEL",
    "GenerationDefaults",
    "LoadFormat",
    "ModelSource",
    "fill_dummy_",
    "iter_weights",
    "resolve_model",
    "weight_files",
]

DUMMY_STD = 0.02  # what models of these architectures are initialised with

_GROUP_ELEMENTS = 1 << 24  # 64 MiB of float32


def iter_weights(source: ModelSource) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor in host memory, in the stored dtype) for every weight the model uses; none for a dummy source.

    Left out: a stored lm_head of a model that ties it to the embedding, and rotary tables (computed by the model).
    Raises ModelError for a damaged file.
    """
    for path in source.weight_files:
        try:
            for names in _groups(path):
                # A mapping lives as long as a tensor of it. A new one a group lets go of the pages of what was copied.
                with safe_open(path, framework="pt", device="cpu") as file:
                    for name in names:
                        tied = name == "lm_head.weight" and source.config.tie_word_embeddings
                        if not tied and not name.endswith("rotary_emb.inv_freq"):
                            yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{path} is damaged: {error}; download or convert it again") from error


def _groups(path: Path) -> list[list[str]]:
    """The names in a file, cut into groups of about _GROUP_ELEMENTS elements."""
    groups: list[list[str]] = [[]]
    size = 0
    with safe_open(path, framework="pt", device="cpu") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            if size > _GROUP_ELEMENTS:
                groups.append([])
                size = 0
            groups[-1].append(name)
            size += math.prod(file.get_slice(name).get_shape())
    return groups


def fill_dummy_(tensor: torch.Tensor, name: str, seed: int = 0) -> None:
    """Fill a parameter in place, on its own device, from (seed, name) alone: norms 1, biases 0, the rest normal.

    The same name, shape, dtype and device kind give the same values in every process.
    """
    with torch.no_grad():
        if name.endswith("bias"):
            tensor.zero_()
        elif "norm" in name.rsplit(".", 2)[-2]:
            tensor.fill_(1.0)
        else:
            mixed = zlib.crc32(f"{seed}/{name}".encode())  # 32 bits: the CPU generator ignores the upper ones
            generator = torch.Generator(tensor.device).manual_seed(mixed)
            tensor.normal_(0.0, DUMMY_STD, generator=generator)
