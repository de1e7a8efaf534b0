"""Ray's dashboard, started by the first who connects to its port: until then it would take 225 MB for nobody."""

import asyncio
import logging
import socket
import threading
from contextlib import suppress
from functools import partial
from typing import Any

from deployments import ports

logger = logging.getLogger("trn_vision_serve")

PORT = 8265
"""Where people, and Ray's commands, look for the dashboard."""


class DashboardOnDemand:
    """Listens where the dashboard would, on this machine alone, and passes its connections on to it."""

    def __init__(self, node: Any) -> None:
        """`node`: Ray's own object of the head node that this process has started."""
        self._node = node
        self._port = PORT if ports.is_free(PORT) else ports.any_free()
        self._socket = socket.create_server(("127.0.0.1", self._port))
        self._dashboard: asyncio.Task[int] | None = None
        self.address = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        threading.Thread(target=partial(asyncio.run, self._serve()), name="dashboard", daemon=True).start()

    async def _serve(self) -> None:
        async with await asyncio.start_server(self._pass_on, sock=self._socket) as server:
            await server.serve_forever()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._dashboard is None:
                self._dashboard = asyncio.ensure_future(asyncio.to_thread(self._start_dashboard))
            port = await asyncio.shield(self._dashboard)
            its_reader, its_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_copy(reader, its_writer), _copy(its_reader, writer))
        except Exception as error:
            logger.warning("Ray's dashboard cannot be reached: %r", error)
        finally:
            writer.close()

    def _start_dashboard(self) -> int:
        """Returns its port once it listens."""
        from ray._private import ray_constants

        # What `ray.init` starts where it shall not include the dashboard; the next one would wait for its address.
        self._node.kill_dashboard(check_alive=False)
        self._node.get_gcs_client().internal_kv_del(
            ray_constants.DASHBOARD_ADDRESS.encode(), False, ray_constants.KV_NAMESPACE_DASHBOARD
        )
        port = self._node._ray_params.dashboard_port = ports.any_free()
        self._node.start_api_server(include_dashboard=True, raise_on_failure=True)
        return port


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    writer.close()
