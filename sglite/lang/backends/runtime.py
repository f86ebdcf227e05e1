"""`Runtime`: SGLang's name for a model that a script starts and ends itself."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator
from typing import Any

# Of the HTTP server that SGLang starts here. None is started: the engine runs in this process.
_SERVER_OPTIONS = ("log_level", "launch_timeout", "host", "port")


class Runtime:
    """An Engine with SGLang's methods. `sglite serve` and RuntimeEndpoint are for a server of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """As `sglite.Engine`; options of SGLang's HTTP server are taken and have no effect."""
        engine_options = {name: value for name, value in options.items() if name not in _SERVER_OPTIONS}
        # By the public name: programs (this layer) know nothing of engines.
        self.endpoint: Any = importlib.import_module("sglite").Engine(*args, **engine_options)

    def generate(self, prompt: Any, sampling_params: Any = None, **options: Any) -> Any:
        return self.endpoint.generate(prompt, sampling_params, **options)

    async def async_generate(self, prompt: Any, sampling_params: Any = None) -> AsyncIterator[str]:
        """The answer's text, piece by piece."""
        async for output in self.endpoint.stream_async(prompt, sampling_params):
            if output.text:
                yield output.text

    def cache_prefix(self, prefix: str) -> int:
        """Compute a prefix ahead. Returns its tokens."""
        ids = tuple(self.endpoint.encode(prefix, add_special_tokens=True))
        loop = importlib.import_module("sglite.lang.bridge").program_loop()
        return loop.run(self.endpoint.warm_prefix(ids))

    def get_tokenizer(self) -> Any:
        return self.endpoint.tokenizer

    def flush_cache(self) -> bool:
        return importlib.import_module("sglite.lang.api").flush_cache(self.endpoint)

    def shutdown(self) -> None:
        self.endpoint.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
