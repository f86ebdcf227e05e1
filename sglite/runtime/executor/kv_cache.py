"""How many KV pages there are."""

from __future__ import annotations

from sglite.errors import InvalidRequest
from sglite.runtime.config import EngineConfig
from sglite.runtime.device.base import AttentionShape

_CPU_SHARE = 0.25  # of the available memory; the machine has other uses
_CPU_CAP = 384 << 20  # bytes; enough for 8,700 tokens of SmolLM2 at float32
_GIB = 1 << 30


def num_pages(config: EngineConfig, shape: AttentionShape, *, free: int, on_cpu: bool, max_model_len: int) -> int:
    """`free`: bytes that the device has left after the weights. Raises InvalidRequest where not one page fits."""
    page_bytes = shape.bytes_per_token * config.page_size
    if config.num_pages is not None:
        _check_room("num_pages", config.num_pages, config.num_pages * page_bytes, free, on_cpu)
        return config.num_pages
    if config.kv_memory is not None:
        pages = int(config.kv_memory * _GIB) // page_bytes
        _check_room("kv_memory", config.kv_memory, pages * page_bytes, free, on_cpu)
    else:
        budget = free * (_CPU_SHARE if on_cpu else config.memory_fraction)
        most = config.max_rows * max_model_len * shape.bytes_per_token
        pages = (
            int(min(budget, most, max(_CPU_CAP, max_model_len * shape.bytes_per_token) if on_cpu else most))
            // page_bytes
        )
    if pages < 1:
        raise InvalidRequest(
            f"there is no memory for KV: a page takes {page_bytes >> 10} KiB and {free >> 20} MiB are free; "
            "set kv_memory, or use a smaller model",
            param="kv_memory",
        )
    return pages


def _check_room(name: str, value: float, asked: int, free: int, on_cpu: bool) -> None:
    """Of the KV that an option asks for. A CPU's memory is taken page by page as it is used, so too much of it would be
    noticed by the machine's out-of-memory killer. Raises InvalidRequest."""
    if on_cpu and asked > free:
        raise InvalidRequest(
            f"{name}={value:g} means {asked / _GIB:.1f} GiB of KV, and {free / _GIB:.1f} GiB are free", param=name
        )
