"""``blocktable serve``: load a model, serve it, drain on SIGTERM."""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from blocktable.core.errors import ConfigError
from blocktable.serve.config import ServerConfig
from blocktable.serve.heap import use_one_arena

_BACKLOG = 2048  # connections that wait to be accepted, as many as uvicorn's


def serve(
    model: str, config: ServerConfig, options: dict[str, Any], *, prefill: Sequence[str] = ()
) -> None:
    """Serve until SIGINT or SIGTERM; then refuse new connections, finish answers under way for up
    to ``drain_seconds``, and return. ConfigError where the server's packages are missing or the
    address cannot be bound; LoadError for a model that cannot be loaded. With ``prefill`` endpoints
    prompts are computed by those processes (``--role decode``)."""
    try:
        import uvicorn

        from blocktable.serve.app import build_app
        from blocktable.serve.connections import guarded_protocol
    except ImportError as error:
        raise ConfigError(
            f"the server needs the package {error.name}: pip install 'blocktable[serve]'"
        ) from None
    from blocktable.llm import LLM

    listener = listen(config)
    use_one_arena()
    llm = LLM(model, **options)
    engine: Any = llm.engine
    if prefill:
        from blocktable.disaggregated import DecodeEngine

        engine = DecodeEngine(llm.engine, prefill)
    app = build_app(engine, config, model)
    address = opened(listener)
    print(f"serving {config.served_name or model} at http://{address}/v1", file=sys.stderr)
    if config.inspector:
        print(f"inspector at http://{address}/inspect", file=sys.stderr, flush=True)
    if (publisher := getattr(llm.engine, "publisher", None)) is not None:
        print(f"KV events at {publisher.endpoint}", file=sys.stderr, flush=True)
    http: Any = guarded_protocol(config.read_seconds, config.max_head_bytes)
    settings = uvicorn.Config(
        app, http=http, log_level="warning", access_log=False, lifespan="on",
        timeout_graceful_shutdown=max(1, round(config.drain_seconds)),
    )  # fmt: skip
    app.state.server = server = uvicorn.Server(settings)
    _leave_the_model_to_itself()
    server.run(sockets=[listener])


def _leave_the_model_to_itself() -> None:
    """Tell Python's cycle collector that what is here now stays. It looks at old objects only once
    there are a quarter more of them: with the model's among them what hangs on a circle (the
    exception of a client that left a stream) would stay for hours, and each look take long."""
    gc.collect()
    gc.freeze()


def serve_role(
    model: str, role: str, config: ServerConfig, options: dict[str, Any], *,
    prefill: Sequence[str] = (), endpoint: str = "tcp://127.0.0.1:*",
) -> None:  # fmt: skip
    """Serve as ``both`` (one process), ``prefill`` (no HTTP: blocks for decode servers, at
    ``endpoint``) or ``decode`` (HTTP; prompts computed by the ``prefill`` endpoints)."""
    if role not in ("both", "prefill", "decode"):
        raise ConfigError(f"role must be both, prefill or decode, got {role!r}")
    if (role == "decode") != bool(prefill):
        raise ConfigError("--prefill names the prefill processes of --role decode, and only of it")
    if role != "prefill":
        serve(model, config, options, prefill=prefill)
        return
    from blocktable.disaggregated import serve_prefill
    from blocktable.llm import LLM

    engine = LLM(model, **options).engine
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    serve_prefill(
        engine, endpoint, stop.is_set, told=lambda line: print(line, file=sys.stderr, flush=True)
    )


def listen(config: ServerConfig) -> Any:
    """A bound socket, so that a taken port is told before the model is loaded. It names its
    protocol: asyncio sends small pieces at once (TCP_NODELAY) only where a socket does, and an
    answer of a head and a body would come 40 ms late otherwise."""
    import socket

    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise ConfigError(f"cannot listen on {config.host}:{config.port}: {reason}") from None
    return listener


def opened(listener: Any) -> str:
    """``host:port`` of a bound socket that takes connections from now on: whoever is told the
    address may come before the server runs, and waits then instead of being refused."""
    listener.listen(_BACKLOG)
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
