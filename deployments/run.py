"""`serve run` that ends well: on SIGTERM no new requests, those that run finish within a limit, then it exits.

`serve run` itself ends its processes at once on SIGTERM, and on Ctrl-C takes the proxies away from under the answers.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.engine import load_config

_SPARE_S = 5.0
"""Beyond server.shutdown_timeout_s, for the Renderers' own answer."""


class _Terminated(BaseException):
    """SIGTERM. No Exception, so that nothing on the way takes it for an error of its own."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m deployments.run", description="Serve a config file.")
    parser.add_argument("config", help="a Serve config file")
    config = parser.parse_args(arguments).config
    timeout_s = load_config(config).server.shutdown_timeout_s

    import ray
    from ray.serve.scripts import cli

    sys.argv[0] = str(Path(sys.executable).parent / "serve")  # Ray puts its folder into every worker's path
    ray.init(namespace="serve")
    of_ray = signal.getsignal(signal.SIGTERM)

    def on_sigterm(*_: Any) -> None:
        signal.signal(signal.SIGTERM, of_ray)  # a second one ends it at once
        raise _Terminated

    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        cli.main(["run", config], prog_name="serve", standalone_mode=False)
    except _Terminated:
        _finish(timeout_s)


def _finish(timeout_s: float) -> None:
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
    if "RAY_ADDRESS" in os.environ:  # another's cluster goes on
        serve.shutdown()


async def _drain(application: str, timeout_s: float) -> int:
    """Requests left after that on all Renderers. Handles need an event loop where Serve is optimized for throughput."""
    from ray import serve

    renderer: Any = serve.get_deployment_handle("Renderer", application)
    left = await renderer.broadcast("drain", timeout_s).results_async(timeout_s=timeout_s + _SPARE_S)
    return sum(left)


if __name__ == "__main__":
    main()
