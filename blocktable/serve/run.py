"""``blocktable serve``: load a model, serve it, drain on SIGTERM."""

from __future__ import annotations

import sys
from typing import Any

from blocktable.core.errors import ConfigError
from blocktable.serve.config import ServerConfig


def serve(model: str, config: ServerConfig, options: dict[str, Any]) -> None:
    """Serve until SIGINT or SIGTERM; then refuse new connections, finish answers under way for up
    to ``drain_seconds``, and return. ConfigError where the server's packages are missing or the
    address cannot be bound; LoadError for a model that cannot be loaded."""
    try:
        import uvicorn

        from blocktable.serve.app import build_app
    except ImportError as error:
        raise ConfigError(
            f"the server needs the package {error.name}: pip install 'blocktable[serve]'"
        ) from None
    from blocktable.llm import LLM

    listener = listen(config)
    llm = LLM(model, **options)
    app = build_app(llm.engine, config, model)
    host, port = listener.getsockname()[:2]
    name = config.served_name or model
    print(f"serving {name} at http://{host}:{port}/v1", file=sys.stderr)
    if config.inspector:
        print(f"inspector at http://{host}:{port}/inspect", file=sys.stderr, flush=True)
    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="on",
        timeout_graceful_shutdown=max(1, round(config.drain_seconds)),
    )  # fmt: skip
    uvicorn.Server(settings).run(sockets=[listener])


def listen(config: ServerConfig) -> Any:
    """A bound socket, so that a taken port is told before the model is loaded."""
    import socket

    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {reason}") from None
    return listener
