"""The ready line: logged once the application answers through Serve's own HTTP proxy."""

import logging
import time

from configs.engine import ROOT
from telemetry.logs import LOGGER_NAME

_BODY = (
    '{"model": "%s", "max_tokens": 32, "temperature": 0, "messages": [{"role": "user", "content": ['
    '{"type": "image_url", "image_url": {"url": "data:image/png;base64,%%s"}}, '
    '{"type": "text", "text": "Read the digits."}]}]}'
)


def first_request(url: str, model: str, with_key: bool = False) -> str:
    """A shell command that sends an image and prints the answer."""
    image = ROOT / "examples" / "digits-3141.png"
    key = ' -H "Authorization: Bearer $API_KEY"' if with_key else ""
    return (
        f"printf '{_BODY % model}' \"$(base64 -w0 {image})\" | "
        f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d @-"
    )


def announce(model: str, with_key: bool = False, timeout_s: float = 60.0) -> None:
    """Wait until `/health` answers through the proxy, then log how to send a first request."""
    import httpx
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client is not None, "a replica runs inside Serve"
    http = client.http_config
    url = f"http://{http.host or '127.0.0.1'}:{http.port}"
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                break
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    logger = logging.getLogger(LOGGER_NAME)
    logger.info("ready: %s/v1 serves %r. Try:\n%s", url, model, first_request(url, model, with_key))
