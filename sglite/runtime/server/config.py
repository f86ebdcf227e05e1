"""Every option of the server, with its default. `sglite serve` and the options page of the docs read these fields."""

from __future__ import annotations

import dataclasses
import ipaddress
from dataclasses import dataclass, field

from sglite.errors import InvalidRequest
from sglite.runtime.config import check_option, option

TOOL_STRICTNESS = ("always", "declared", "never")
_MAX_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request may ask for. Over a limit is an error 400 (413 for the body), never a truncation."""

    max_body_bytes: int = option(4 * 1024 * 1024, "Largest request body in bytes.", least=1)
    max_n: int = option(16, "Most completions of one prompt (`n`).", least=1)
    max_prompts: int = option(64, "Most prompts in one /v1/completions or /generate request.", least=1)
    max_logprobs: int = option(20, "Most alternatives per token (`top_logprobs`, `logprobs`).", least=0)
    max_prompt_logprobs: int = option(5, "Most alternatives per prompt token.", least=0)
    max_prompt_logprob_values: int = option(
        200_000, "Most values (prompt tokens x alternatives) of prompt logprobs in one answer.", least=0
    )
    max_stop: int = option(16, "Most stop strings (OpenAI allows 4).", least=0)
    max_stop_bytes: int = option(1024, "Longest stop string in UTF-8 bytes.", least=0)
    max_logit_bias: int = option(1024, "Most entries of `logit_bias`.", least=0)
    max_schema_bytes: int = option(256 * 1024, "Largest schema, regex, grammar or choice list in bytes.", least=0)
    max_tools: int = option(128, "Most tools in one request.", least=0)
    max_messages: int = option(4096, "Most messages in one request.", least=1)
    max_metadata: int = option(16, "Most entries of `metadata`.", least=0)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    host: str = option("127.0.0.1", "Address to bind. Anything but loopback needs an API key.")
    port: int = option(30000, "Port to bind; 0 takes a free one.", least=0)
    api_keys: tuple[str, ...] = option((), "Keys that clients may use; none: no key is asked for (loopback only).")
    admin_key: str | None = option(None, "Key for the admin routes; none: with API keys set they are closed.")
    insecure: bool = option(False, "Allow a non-loopback address without an API key.")
    served_model_name: str | None = option(None, "Name in /v1/models; default: the model's own.")
    check_model_name: bool = option(False, "Answer 404 when a request names another model.")
    cors_origins: tuple[str, ...] = option((), "Origins that browsers may call from; none: CORS is off.")
    max_running: int = option(256, "Requests handed to the engine at once; the others wait their turn.", least=1)
    max_waiting: int = option(512, "Requests that may wait; more get 429 at once.", least=0)
    max_waiting_tokens: int = option(2_000_000, "Prompt tokens that may wait; more get 429 at once.", least=1)
    max_connections: int = option(4096, "Connections at once, idle ones included; more get 503.", least=1)
    max_header_bytes: int = option(64 * 1024, "Largest head of a request.", least=1)
    receive_timeout_s: float = option(30.0, "Longest a request may take to arrive, its body included.", least=0.001)
    write_timeout_s: float = option(
        60.0, "A client that takes nothing of its answer for that long is cut off.", least=0.001
    )
    request_timeout_s: float = option(600.0, "Longest a request may take from arrival to its last token.", least=0.001)
    drain_timeout_s: float = option(30.0, "Longest SIGTERM waits for running requests.", least=0)
    tool_strictness: str = option(
        "always",
        "Whose tool arguments obey the schema: of all tools, of those that say `strict`, or of none.",
        choices=TOOL_STRICTNESS,
    )
    tool_format: str = option("auto", "How tool calls are written: auto, hermes, llama3 or generic.")
    reasoning: bool = option(True, "Split a reasoning model's thinking from its answer.")
    log_requests: bool = option(True, "One JSON line a request on stderr.")
    engine: str = option(
        "auto", "Where the engine runs; auto: in a process on a GPU.", choices=("auto", "thread", "process")
    )
    engine_restart: bool = option(True, "Start the engine process again when it died.")
    limits: Limits = field(default_factory=Limits)

    def check(self) -> None:
        """Raises InvalidRequest for a value that cannot work and for a combination that is not safe."""
        for config in (self, self.limits):
            for each in dataclasses.fields(config):
                if each.metadata and not str(each.type).startswith("tuple"):
                    check_option(each, getattr(config, each.name))
        if self.port > _MAX_PORT:
            raise InvalidRequest(f"port must be at most {_MAX_PORT}, not {self.port}", param="port")
        if not (self.api_keys or self.insecure or is_loopback(self.host)):
            raise InvalidRequest(
                f"refusing to listen on {self.host} without an API key: pass --api-key, or --insecure if a proxy "
                "in front checks who calls",
                param="host",
            )
        if any(not key.isascii() or len(key) < 8 for key in (*self.api_keys, *filter(None, [self.admin_key]))):
            raise InvalidRequest("keys must be ASCII and at least 8 characters long", param="api_key")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
