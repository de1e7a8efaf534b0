"""`serve run` that ends well: on SIGTERM no new requests, those that run finish within a limit, then it exits.

`serve run` itself ends its processes at once on SIGTERM, and on Ctrl-C takes the proxies away from under the answers.
"""

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.engine import load_config
from deployments import ports
from deployments.dashboard import DashboardOnDemand

_SPARE_S = 5.0
"""Beyond server.shutdown_timeout_s, for the Renderers' own answer."""

_ANSWER_S = 5.0
"""For the connection to a cluster on this machine, or beside it."""

_DEREGISTRATION = ("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "2")
"""So long an idle Renderer behind HAProxy waits for it to look elsewhere before it ends, and by Serve's default half a
minute, for load balancers that do not ask again elsewhere. Of a cluster of our own."""


class _Terminated(BaseException):
    """SIGTERM. No Exception, so that nothing on the way takes it for an error of its own."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m deployments.run", description="Serve a config file.")
    parser.add_argument("config", help="a Serve config file")
    config = parser.parse_args(arguments).config
    timeout_s = load_config(config).server.shutdown_timeout_s

    own = not joins_a_cluster()
    if own:
        _take_ports(config)
    os.environ.setdefault(*_DEREGISTRATION)
    import ray
    from ray.serve.scripts import cli

    sys.argv[0] = str(Path(sys.executable).parent / "serve")  # Ray puts its folder into every worker's path
    ray.init("local" if own else None, namespace="serve", include_dashboard=False if own else None)
    if own:
        _offer_dashboard()
    of_ray = signal.getsignal(signal.SIGTERM)

    def on_sigterm(*_: Any) -> None:
        signal.signal(signal.SIGTERM, of_ray)  # a second one ends it at once
        raise _Terminated

    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        cli.main(["run", config], prog_name="serve", standalone_mode=False)
    except _Terminated:
        _finish(timeout_s, own)


def _take_ports(config: str) -> None:
    """Ends the process where somebody listens on the HTTP port; HAProxy gets ports that nobody has."""
    port = ports.http_port(config)
    if not ports.is_free(port):
        sys.exit(f"port {port} is in use, by another application perhaps: end that, or change http_options.port")
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
        chosen = ports.of_haproxy()
        os.environ |= chosen
        moved = [
            f"{name}={value}" for name, value in chosen.items() if int(value) != ports.HAPROXY.get(name, int(value))
        ]
        if moved:
            print(f"HAProxy's usual ports are in use; it has {' '.join(moved)}", flush=True)


def _offer_dashboard() -> None:
    """Where Ray has it, but started when somebody looks."""
    from ray._private import worker

    dashboard = DashboardOnDemand(worker._global_node)
    dashboard.start()
    print(f"Ray's dashboard: {dashboard.address}, started by the first visit", flush=True)


def joins_a_cluster() -> bool:
    """Whether there is a Ray cluster to join: the one that RAY_ADDRESS names, else that of `ray start` on this machine.

    Ray finds the latter in a file, which stays behind where Ray was killed: then it would wait for nobody, and fail.
    """
    from ray._common.utils import get_ray_address_file

    if address := os.environ.get("RAY_ADDRESS"):
        return address != "local"
    file = Path(get_ray_address_file(None))
    if not file.exists():
        return False
    address = file.read_text().strip()
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
    except (OSError, ValueError, OverflowError):
        print(
            f"{file} names a Ray cluster at {address!r}, where nobody answers: starting another (remove the file, or "
            "set RAY_ADDRESS)",
            flush=True,
        )
        return False
    print(f"joining the Ray cluster at {address}, which {file} names", flush=True)
    return True


def _finish(timeout_s: float, own: bool) -> None:
    from ray import serve

    print(f"SIGTERM: no new requests; those that run get {timeout_s:g} s (server.shutdown_timeout_s)", flush=True)
    for name, application in serve.status().applications.items():
        if "Renderer" in application.deployments:
            try:
                left = asyncio.run(_drain(name, timeout_s))
                print(f"{left} requests were not finished in time", flush=True)
            except Exception as error:  # it ends all the same
                print(f"the Renderers could not be asked to finish: {error!r}", flush=True)
        serve.delete(name)
    if not own:  # another's cluster goes on
        serve.shutdown()


async def _drain(application: str, timeout_s: float) -> int:
    """Requests left after that on all Renderers. Handles need an event loop where Serve is optimized for throughput."""
    from ray import serve

    renderer: Any = serve.get_deployment_handle("Renderer", application)
    left = await renderer.broadcast("drain", timeout_s).results_async(timeout_s=timeout_s + _SPARE_S)
    return sum(left)


if __name__ == "__main__":
    main()
