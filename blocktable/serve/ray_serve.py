"""``blocktable serve --ray``: replicas as Ray Serve deployments, a router in front of them.

Each replica is a deployment of its own with one actor, which serves HTTP and publishes its cache
events; Ray places the actors on the machines of its cluster. A dead replica is routed around; Ray
starts it anew, and the router asks Ray where.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

from blocktable.core.errors import ConfigError
from blocktable.serve.config import ServerConfig
from blocktable.serve.router import Replica, Router, build_router


def _import_ray() -> Any:
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise ConfigError("many replicas need Ray: pip install 'ray[serve]'") from error
    return ray, serve


class ReplicaServer:
    """The actor: a model behind an HTTP server on a free port."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import uvicorn

        from blocktable.llm import LLM
        from blocktable.serve.app import build_app
        from blocktable.serve.run import listen, opened

        self._host = socket.gethostbyname(socket.gethostname())
        events = f"tcp://{self._host}:*"
        llm = LLM(model, **options, kv_events=events, kv_events_replay=events)
        config = ServerConfig(host=self._host, port=0, served_name=model, inspector=False)
        listener = listen(config)
        address = f"http://{opened(listener)}"
        publisher: Any = llm.engine.publisher  # pyright: ignore[reportAttributeAccessIssue]
        self._place = (address, publisher.endpoint, publisher.replay_endpoint)
        settings = uvicorn.Config(
            build_app(llm.engine, config, model), log_level="warning", access_log=False
        )
        server = uvicorn.Server(settings)
        threading.Thread(target=server.run, args=([listener],), daemon=True).start()

    def place(self) -> tuple[str, str, str]:
        """URL, events endpoint, replay endpoint."""
        return self._place

    def die(self) -> None:
        """End the process at once; for tests of failure."""
        import os

        os._exit(1)


def start_replicas(model: str, options: dict[str, Any], count: int) -> list[tuple[Any, Replica]]:
    """Deploy ``count`` replicas; each with its handle. ConfigError without Ray."""
    _, serve = _import_ray()
    from blocktable.engine.options import EngineOptions

    chosen = EngineOptions(**options)
    needs = {"num_cpus": 0, "num_gpus": chosen.num_ranks if chosen.on_gpu else 0}
    serve.start(proxy_location="Disabled")  # replicas answer by themselves; its port stays free
    made = []
    for number in range(count):
        deployment = serve.deployment(
            ReplicaServer, name=f"replica-{number}", num_replicas=1, ray_actor_options=needs
        )
        handle = serve.run(
            deployment.bind(model, options), name=f"replica-{number}", route_prefix=None
        )
        made.append((handle, Replica(*handle.place.remote().result(timeout_s=300))))
    return made


def _place(handle: Any) -> Replica | None:
    """Where a deployment's replica is now; None while there is none."""
    try:
        return Replica(*handle.place.remote().result(timeout_s=5))
    except Exception:  # Ray's errors have no common base: whatever it is, nobody answers there
        return None


def serve_ray(model: str, config: ServerConfig, options: dict[str, Any], *, replicas: int) -> None:
    """Serve through a router until interrupted. ``options`` are the engine's of each replica; a
    seed is given where there is none, so that all make the same prefix keys."""
    import uvicorn

    from blocktable.serve.run import listen, opened

    ray, serve = _import_ray()
    options = {"seed": 0, "block_size": 16} | options
    listener = listen(config)
    ray.init(ignore_reinit_error=True, log_to_driver=False)
    try:
        made = start_replicas(model, options, replicas)
        block = options["block_size"] * options.get("context_parallel_size", 1)
        router = Router(
            [replica for _, replica in made], block_size=block, seed=options["seed"],
            find=lambda number: _place(made[number][0]),
        )  # fmt: skip
        print(f"routing to {replicas} replicas at http://{opened(listener)}/v1", flush=True)
        settings = uvicorn.Config(build_router(router), log_level="warning", access_log=False)
        uvicorn.Server(settings).run(sockets=[listener])
    finally:
        serve.shutdown()
        ray.shutdown()
