"""One file an endpoint, or a few that belong together. A new one is a line in ROUTERS."""

from __future__ import annotations

from sglite.runtime.server.routes import chat, completions, generate, messages, programs, responses, system, tokens

ROUTERS = (
    chat.router,
    completions.router,
    responses.router,
    messages.router,
    generate.router,
    programs.router,
    tokens.router,
    system.router,
)
