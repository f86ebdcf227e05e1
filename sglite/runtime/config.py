"""Every option of an engine. The CLI, the server and the documentation read the fields and their help from here."""

from __future__ import annotations

import dataclasses
import numbers
import os
from dataclasses import dataclass
from typing import Any

from sglite.errors import InvalidRequest

MAX_COMPLETIONS = 128
_INT32 = 2**31 - 1  # page numbers are int32
POLICIES = ("program", "fcfs")


_KINDS: dict[str, tuple[str, type]] = {
    "str": ("a text", str),
    "int": ("a whole number", numbers.Integral),
    "float": ("a number", numbers.Real),
    "bool": ("true or false", bool),
}


def option(
    default: Any, help: str, *, choices: tuple[Any, ...] = (), least: float | None = None, most: float | None = None
) -> Any:
    """A field with its documentation; `choices` lists the only values that work (empty: any), `least` and `most` are
    the smallest and the largest number that do."""
    metadata = {"help": help, "choices": choices, "least": least, "most": most}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of one engine. Raises InvalidRequest for values that cannot work."""

    model: str = option("smollm2", "Name of a known model, a local folder, a GGUF file or a hub id.")
    tokenizer: str | None = option(None, "Where the tokenizer is, if not beside the model.")
    served_name: str | None = option(None, "The name that the API shows; by default that of the model.")
    device: str = option("auto", "'cpu', 'cuda', 'cuda:1'; 'auto' takes a GPU where there is one.")
    dtype: str = option(
        "auto",
        "Type of weights and activations; 'auto' is float32 on the CPU and the checkpoint's on a GPU. "
        "'int8' stores weights in 8 bits (CPU).",
        choices=("auto", "float32", "bfloat16", "float16", "int8"),
    )
    load_format: str = option(
        "auto", "'dummy' makes random weights from config.json alone.", choices=("auto", "safetensors", "gguf", "dummy")
    )
    seed: int = option(0, "Seed of dummy weights and of requests that bring none.")
    num_threads: int | None = option(None, "CPU threads; by default what the control group allows.", least=1, most=1024)
    tensor_parallel: int = option(1, "GPUs that share one model. Only 1 works: start one engine for each GPU.", least=1)

    max_model_len: int | None = option(
        None, "Longest prompt and output together, in tokens; by default the model's.", least=1
    )
    page_size: int = option(1, "Tokens in a KV page; the unit in which prefixes are shared.", least=1, most=65_536)
    num_pages: int | None = option(None, "KV pages; by default as many as kv_memory allows.", least=1, most=_INT32)
    kv_memory: float | None = option(
        None, "GiB for KV; by default a share of what is free after the weights.", least=0, most=1 << 20
    )
    memory_fraction: float = option(0.88, "Share of the device's memory that weights and KV together may take.")
    cuda_graphs: bool = option(True, "Replay captured graphs for small steps on a GPU.")
    compile_ahead: bool = option(
        False,
        "Compile all kernels that steps may need before the first request, once on a machine; else each when it is "
        "first needed (GPU).",
    )
    tree_attention: bool = option(
        True, "On a GPU, read a prefix that several rows share once for all of them where that is faster."
    )

    deterministic: bool = option(
        False,
        "Greedy text that depends on neither batch mates nor cache hits nor chunks, to the last bit; slower (GPU).",
    )

    max_rows: int = option(256, "Completions that run at the same time.", least=1, most=65_536)
    max_step_tokens: int | None = option(
        None,
        "New tokens in one step; longer prompts are computed in pieces. By default 8192 on a GPU, 512 on a CPU.",
        least=1,
    )
    max_waiting: int | None = option(
        None, "Waiting completions after which a new request is refused as overloaded.", least=0
    )
    overlap: bool | None = option(
        None, "Prepare a step while the device computes the one before; by default where the device can."
    )
    policy: str = option("program", "Order of waiting requests.", choices=POLICIES)
    max_wait_s: float = option(10.0, "A request that has waited this long goes before all policy, in seconds.", least=0)
    gang_wait_s: float = option(
        0.002, "How long the first of several sibling calls waits for the others, in seconds.", least=0
    )
    prefix_cache: bool = option(True, "Keep computed prefixes for later requests.")
    lease_s: float = option(30.0, "How long a program's prefixes are kept for its next call, in seconds.", least=0)
    hold_s: float = option(60.0, "How long a held row waits to be continued, in seconds.", least=0)
    jump_forward: bool = option(True, "Enter text that a grammar forces without a decode step for each token.")
    prompt_lookup: int = option(
        0, "Tokens that are tried ahead where the text repeats itself; 0 is off. The output does not change.", least=0
    )
    lookup_rows: int = option(8, "Running completions up to which prompt_lookup tries.", least=0)
    max_completions: int = option(MAX_COMPLETIONS, "Largest n of one request.", least=1)
    stop_regex_budget_s: float = option(
        0.1, "Time that the stop regexes of one completion may take in all, in seconds.", least=0
    )
    access_log: int = option(
        0,
        "Admissions that are remembered to compare the prefix cache with the best one in hindsight: recent_hit_rate and"
        " best_hit_rate in the statistics, each question for which takes a millisecond an admission. 0 is off.",
        least=0,
    )
    check_invariants: bool = option(False, "Check the page accounting after every step and log what is wrong.")

    def __post_init__(self) -> None:
        for name in ("model", "tokenizer"):
            if isinstance(value := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(value))
        for field in dataclasses.fields(self):
            check_option(field, getattr(self, field.name))
        if not 0 < self.memory_fraction <= 1:
            raise InvalidRequest("memory_fraction must be above 0 and at most 1", param="memory_fraction")
        if self.tensor_parallel > 1:
            raise InvalidRequest(
                f"tensor_parallel={self.tensor_parallel}: a model is not split over GPUs; start one engine for each "
                "GPU (device='cuda:0', device='cuda:1', ...)",
                param="tensor_parallel",
            )


def check_option(field: dataclasses.Field[Any], value: Any) -> None:
    """Of a field that `option` made. Raises InvalidRequest that names it."""
    kind, _, or_none = str(field.type).partition(" | ")
    if value is None and or_none:
        return
    called, of_type = _KINDS[kind]
    if not isinstance(value, of_type) or (isinstance(value, bool) and kind != "bool"):
        raise InvalidRequest(f"{field.name} must be {called}, not {value!r}", param=field.name)
    choices, least, most = (field.metadata[name] for name in ("choices", "least", "most"))
    if choices and value not in choices:
        raise InvalidRequest(
            f"{field.name} must be one of {', '.join(map(str, choices))}, not {value!r}", param=field.name
        )
    if least is not None and not value >= least:  # NaN is not
        raise InvalidRequest(f"{field.name} must be at least {least}, not {value}", param=field.name)
    if most is not None and value > most:
        raise InvalidRequest(f"{field.name} must be at most {most}, not {value}", param=field.name)


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """What a request's `None` means: the model's generation_config, else these neutral values."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
