"""Remote images: from an http(s) URL to bytes, from listed hosts and public addresses only.

A URL is parsed once, and what was checked is what is used: the host against multimodal.allowed_url_hosts, each address
that it resolves to, and the connection goes to such an address, not to the name. A redirect begins anew.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable
from functools import cached_property

import httpx

from configs.engine import MultimodalSettings
from deployments.renderer.errors import APIError, shorten
from deployments.renderer.images import too_many_bytes
from deployments.renderer.network import Network

_DEFAULT_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_ADDRESSES_TRIED = 3

# It logs URLs, which may hold a client's secrets.
logging.getLogger("httpx").setLevel(logging.WARNING)


class ImageFetcher:
    """Fetches for one Renderer; at most `multimodal.max_url_fetches` at a time. Lives on one event loop."""

    def __init__(self, settings: MultimodalSettings, network: Network | None = None) -> None:
        self._settings = settings
        self._network = network or Network()
        self._places = asyncio.Semaphore(settings.max_url_fetches)

    async def fetch(self, url: str, on_bytes: Callable[[int], None]) -> bytes:
        """The bytes behind `url`; `on_bytes` hears of each chunk's size and may raise to end it. Raises APIError.

        Neither proxies nor credentials of the environment are used.
        """
        target = self._checked(url, url)
        timeout = self._settings.url_timeout_s
        try:
            async with asyncio.timeout(timeout), self._places, self._client() as client:
                for _ in range(self._settings.max_url_redirects + 1):
                    result = await self._get(client, target, url, on_bytes)
                    if isinstance(result, bytes):
                        return result
                    target = self._checked(str(result), url)
        except TimeoutError:
            raise _failed(url, f"not there within {timeout:g} s (multimodal.url_timeout_s)") from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError, ValueError) as error:
            raise _failed(url, type(error).__name__) from None
        raise _failed(url, f"more than {self._settings.max_url_redirects} redirects (multimodal.max_url_redirects)")

    def _client(self) -> httpx.AsyncClient:
        """Of one fetch, whose cookies go with it."""
        return httpx.AsyncClient(
            follow_redirects=False, trust_env=False, verify=self._trusted, timeout=self._settings.url_timeout_s
        )

    @cached_property
    def _trusted(self) -> ssl.SSLContext:  # reading the certificates takes tens of milliseconds
        return self._network.trusted or httpx.create_ssl_context(trust_env=False)

    async def _get(
        self, client: httpx.AsyncClient, target: httpx.URL, url: str, on_bytes: Callable[[int], None]
    ) -> bytes | httpx.URL:
        """The body, or where a redirect leads."""
        failure: Exception = OSError("no address")
        for address in await self._addresses(target, url):
            request = client.build_request(
                "GET",
                target.copy_with(host=address),
                headers={"Host": target.netloc.decode(), "Accept": "image/*", "Accept-Encoding": "identity"},
                extensions={"sni_hostname": target.raw_host.decode()},  # the certificate must be the host's
            )
            try:
                response = await client.send(request, stream=True)
            except httpx.ConnectError as error:
                failure = error
                continue
            try:
                if response.status_code in _REDIRECTS and "Location" in response.headers:
                    return target.join(response.headers["Location"])
                return await self._read(response, url, on_bytes)
            finally:
                await response.aclose()
        raise failure

    async def _addresses(self, target: httpx.URL, url: str) -> list[str]:
        """Of the target's host, all of them public. Raises APIError, OSError."""
        host = target.raw_host.decode().strip("[]")
        addresses = await self._network.resolve(host, target.port or _DEFAULT_PORTS[target.scheme])
        if not addresses or not all(map(self._network.is_allowed, addresses)):
            raise APIError(
                f"{shorten(url)}: host {shorten(host)} is not at a public address: expected one on the internet",
                code="image_url_not_allowed",
            )
        return addresses[:_ADDRESSES_TRIED]

    async def _read(self, response: httpx.Response, url: str, on_bytes: Callable[[int], None]) -> bytes:
        if response.status_code != 200:
            raise _failed(url, f"its server answered {response.status_code}, expected 200")
        limit, body = self._settings.max_image_bytes, bytearray()
        announced = response.headers.get("Content-Length", "")
        if announced.isdecimal() and len(announced) < 20 and int(announced) > limit:
            raise too_many_bytes(f"{int(announced):,}", self._settings)
        async for chunk in response.aiter_raw():  # whatever it is packed in, it is not unpacked
            on_bytes(len(chunk))
            body += chunk
            if len(body) > limit:
                raise too_many_bytes(f"more than {limit:,}", self._settings)
        return bytes(body)

    def _checked(self, target: str, url: str) -> httpx.URL:
        """`target`, parsed, if it may be asked for; `url` is what the client sent, which led there."""
        settings = self._settings
        which = shorten(url) if target == url else f"{shorten(url)}, which redirects"
        try:
            parsed = httpx.URL(target)
            host, scheme = parsed.raw_host.decode().lower(), parsed.scheme
        except (httpx.InvalidURL, ValueError):
            raise APIError(f"{which}: not a URL", code="invalid_image_url") from None
        if scheme not in _DEFAULT_PORTS:
            raise APIError(
                f"{which}: scheme {shorten(scheme)} is not supported: expected a data: URL"
                + (", or https to an allowed host" if settings.allowed_url_hosts else ""),
                code="invalid_image_url",
            )
        if not settings.allowed_url_hosts:
            raise APIError(
                f"{which}: this server does not fetch images: send a data: URL, or list the host in the "
                "setting multimodal.allowed_url_hosts",
                code="image_url_not_allowed",
            )
        if scheme == "http" and not settings.allow_http_urls:
            raise APIError(
                f"{which}: plain http is not allowed: expected https, or the setting multimodal.allow_http_urls",
                code="image_url_not_allowed",
            )
        netloc = f"[{host}]" if ":" in host else host
        if parsed.port not in (None, _DEFAULT_PORTS[scheme]):
            netloc += f":{parsed.port}"
        if parsed.userinfo or netloc not in settings.allowed_url_hosts:
            raise APIError(
                f"{which}: host {shorten(netloc)} is not allowed: expected one of "
                f"{', '.join(settings.allowed_url_hosts)} (multimodal.allowed_url_hosts), without user name or "
                "password",
                code="image_url_not_allowed",
            )
        return parsed


def _failed(url: str, why: str) -> APIError:
    return APIError(f"{shorten(url)} could not be fetched: {why}", code="image_fetch_failed")
