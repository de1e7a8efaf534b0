"""Remote images come from listed hosts at public addresses, or not at all."""

import asyncio
import gzip
import logging
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from configs.engine import ConfigError, MultimodalSettings, parse_config
from deployments.renderer.errors import APIError
from deployments.renderer.fetch import ImageFetcher
from deployments.renderer.network import Network, is_public, resolve
from tests.deployments.renderer.conftest import encoded, picture
from tests.support.image_site import Names, Site, certificate, network, serving, trickle

PNG = encoded(picture())
HOST = "images.test"


@dataclass
class Sites:
    """One server that speaks TLS as images.test, and one that speaks plain HTTP."""

    https: Site
    http: Site
    trusted: ssl.SSLContext

    @property
    def hosts(self) -> tuple[str, ...]:
        return (self.https.netloc, self.http.netloc)


@pytest.fixture(scope="module")
def _sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    server, trusted = certificate([HOST], tmp_path_factory.mktemp("certificate"))
    with serving(HOST, tls=server) as https, serving(HOST) as http:
        yield Sites(https, http, trusted)


@pytest.fixture
def sites(_sites: Sites) -> Sites:
    for site in (_sites.https, _sites.http):
        site.asked.clear()
        site.answers = {"/a.png": (200, {}, PNG)}
    return _sites


def get(url: str, outside: Network | None = None, **settings) -> bytes:
    async def run() -> bytes:
        return await ImageFetcher(MultimodalSettings(**settings), outside).fetch(url, lambda size: None)

    return asyncio.run(run())


def loopback(sites: Sites, **names: list) -> Network:
    """images.test, and names of the test's own, at addresses; 127.0.0.1 is allowed."""
    return network(Names({HOST: [["127.0.0.1"]], **names}), sites.trusted)


def refused(url: str, outside: Network | None = None, **settings) -> APIError:
    with pytest.raises(APIError) as raised:
        get(url, outside, **settings)
    assert raised.value.status == 400
    return raised.value


@pytest.mark.parametrize(
    ("url", "hosts", "message"),
    [
        ("http://example.com/a.png", (), "multimodal.allowed_url_hosts"),
        ("https://example.com/a.png", ("other.org",), "expected one of other.org"),
        ("https://other.org.example.com/a.png", ("other.org",), "expected one of other.org"),
        ("https://other.org./a.png", ("other.org",), "expected one of other.org"),
        ("https://other.org@example.com/a.png", ("other.org",), "expected one of other.org"),
        ("https://other.org\\@example.com/a.png", ("other.org",), "expected one of other.org"),
        ("https://user:pw@other.org/a.png", ("other.org",), "without user name"),
        ("https://other.org:8443/a.png", ("other.org",), "'other.org:8443' is not allowed"),
        ("https://other.org/a.png", ("other.org:8443",), "'other.org' is not allowed"),
        ("http://other.org/a.png", ("other.org",), "plain http is not allowed: expected https"),
        ("file:///etc/passwd", ("other.org",), "'file' is not supported: expected a data: URL"),
        ("ftp://other.org/a", ("other.org",), "'ftp' is not supported"),
        ("//other.org/a", ("other.org",), "'' is not supported"),
        ("not a url", (), "expected a data: URL"),
        ("", (), "expected a data: URL"),
        ("https://[::1", ("other.org",), "not a URL"),
        ("https://other.org\n.example.com/", ("other.org",), "not a URL"),
    ],
)
def test_what_is_not_listed_is_refused_without_a_look(url, hosts, message):
    async def never(host: str, port: int) -> list[str]:
        raise AssertionError(f"{host} was looked up")

    assert message in refused(url, Network(resolve=never), allowed_url_hosts=hosts).message


@pytest.mark.parametrize("host", ["https://a.org", "a.org/path", "", "a b", "*.a.org", "user@a.org"])
def test_a_listed_host_is_a_host(host):
    with pytest.raises(ConfigError, match=r"multimodal.allowed_url_hosts.*expected a host name or address"):
        parse_config({"multimodal": {"allowed_url_hosts": [host]}})


def test_https_from_a_listed_host(sites: Sites):
    names = Names({HOST: [["127.0.0.1"]]})
    outside = network(names, sites.trusted)
    url = f"https://{sites.https.netloc}/a.png"
    assert get(url, outside, allowed_url_hosts=[sites.https.netloc.upper()]) == PNG
    assert sites.https.asked == [(sites.https.netloc, "/a.png")]
    assert names.asked == [HOST]


def test_the_certificate_must_be_the_hosts(sites: Sites):
    other = f"other.test:{sites.https.port}"
    outside = loopback(sites, **{"other.test": [["127.0.0.1"]]})
    error = refused(f"https://{other}/a.png", outside, allowed_url_hosts=[other])
    assert "could not be fetched: ConnectError" in error.message
    untrusting = Network(outside.resolve, outside.is_allowed)
    error = refused(f"https://{sites.https.netloc}/a.png", untrusting, allowed_url_hosts=sites.hosts)
    assert "could not be fetched: ConnectError" in error.message
    assert sites.https.asked == []


def test_plain_http_where_a_setting_says_so(sites: Sites):
    url = f"http://{sites.http.netloc}/a.png"
    assert "multimodal.allow_http_urls" in refused(url, loopback(sites), allowed_url_hosts=sites.hosts).message
    assert sites.http.asked == []
    assert get(url, loopback(sites), allowed_url_hosts=sites.hosts, allow_http_urls=True) == PNG


PUBLIC = ["8.8.8.8", "1.1.1.1", "2001:4860:4860::8888", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
NOT_PUBLIC = {
    "loopback": ["127.0.0.1", "127.1.2.3", "::1"],
    "private": ["10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "fc00::1", "fd12::1", "fec0::1"],
    "link-local": ["169.254.0.1", "fe80::1", "fe80::1%eth0"],
    "carrier-grade NAT": ["100.64.0.1", "100.127.255.255"],
    "metadata": ["169.254.169.254", "fd00:ec2::254", "100.100.100.200", "192.0.0.192", "168.63.129.16"],
    "unspecified": ["0.0.0.0", "0.1.2.3", "::"],
    "multicast": ["224.0.0.1", "239.255.255.250", "ff02::1", "ff0e::1"],
    "reserved": ["240.0.0.1", "255.255.255.255", "192.0.0.8", "198.18.0.1", "192.88.99.1", "4000::1", "100::1"],
    "documentation": ["192.0.2.1", "198.51.100.1", "203.0.113.1", "2001:db8::1", "3fff::1"],
    "IPv4 inside": [
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:a9fe:a9fe", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe"),
        *("64:ff9b:1::808:808", "::127.0.0.1", "::8.8.8.8", "2002:7f00:1::", "2002:808:808::", "2001:0:808:808::1"),
    ],
    "nonsense": ["", "localhost", "1.2.3", "8.8.8.8/32", "0177.0.0.1", "2130706433"],
}


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses(address):
    assert is_public(address)


@pytest.mark.parametrize(("kind", "address"), [(kind, each) for kind, all in NOT_PUBLIC.items() for each in all])
def test_addresses_that_are_never_connected_to(kind, address, monkeypatch):
    """However the name resolves: the rules of production, with only the resolver replaced."""
    assert not is_public(address), kind
    connected = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, to: connected.append(to))
    monkeypatch.setattr(socket.socket, "connect_ex", lambda self, to: connected.append(to))
    for addresses in ([address], ["8.8.8.8", address]):  # one bad address among good ones is enough
        outside = Network(resolve=Names({HOST: [addresses]}))
        error = refused(f"https://{HOST}/a.png", outside, allowed_url_hosts=[HOST])
        assert (error.code, "is not at a public address" in error.message) == ("image_url_not_allowed", True)
    assert connected == []


@pytest.mark.parametrize(
    "host",
    ["localhost", "127.0.0.1", "2130706433", "0177.0.0.1", "0x7f.1", "0x7f000001", "127.1", "0", "[::1]",
     "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[0:0:0:0:0:0:0:1]"],
)  # fmt: skip
def test_no_way_to_write_loopback_is_let_through(host, sites: Sites):
    """With the real resolver, and the host listed: a mistake in the settings does not open the machine."""
    netloc = f"{host}:{sites.http.port}"
    error = refused(f"http://{netloc}/a.png", allowed_url_hosts=[netloc], allow_http_urls=True)
    assert error.code in ("image_url_not_allowed", "invalid_image_url"), error.message
    assert sites.http.asked == []


def test_the_resolver_gives_the_addresses_of_a_host():
    assert asyncio.run(resolve("127.0.0.1", 80)) == ["127.0.0.1"]
    assert set(asyncio.run(resolve("localhost", 80))) <= {"127.0.0.1", "::1"}


def test_the_address_that_was_checked_is_the_one_connected_to(monkeypatch):
    """A name that resolves to another address a moment later (DNS rebinding) gains nothing."""
    with serving(HOST, "127.0.0.2") as checked:
        checked.answers = {"/a.png": (200, {}, PNG), "/again": (302, {"Location": "/a.png"}, b"")}
        names = Names({HOST: [["127.0.0.2"], ["127.0.0.3"]]})
        outside = network(names, also_allowed=["127.0.0.2"])
        looked_up: list = []
        real = socket.getaddrinfo
        monkeypatch.setattr(
            socket, "getaddrinfo", lambda host, *rest, **kw: (looked_up.append(host), real(host, *rest, **kw))[1]
        )
        settings = {"allowed_url_hosts": [checked.netloc], "allow_http_urls": True}
        assert get(f"http://{checked.netloc}/a.png", outside, **settings) == PNG
        assert names.asked == [HOST]
        assert set(looked_up) <= {"127.0.0.2"}  # nobody looked the name up again
        # A redirect is looked up again, and checked again.
        names = Names({HOST: [["127.0.0.2"], ["127.0.0.3"]]})
        error = refused(f"http://{checked.netloc}/again", network(names, also_allowed=["127.0.0.2"]), **settings)
        assert "is not at a public address" in error.message
        assert [path for _, path in checked.asked] == ["/a.png", "/again"]


def test_an_address_that_does_not_answer_is_followed_by_the_next(sites: Sites):
    names = Names({HOST: [["127.0.0.9", "127.0.0.1"]]})
    outside = network(names, sites.trusted, also_allowed=["127.0.0.9", "127.0.0.1"])
    assert get(f"https://{sites.https.netloc}/a.png", outside, allowed_url_hosts=sites.hosts) == PNG


def test_redirects_are_held_to_the_same_rules(sites: Sites):
    outside = loopback(sites, **{"evil.test": [["127.0.0.1"]], "metadata.test": [["169.254.169.254"]]})
    https, http = sites.https, sites.http
    places = {
        "/relative": "/a.png",
        "/absolute": f"https://{https.netloc}/a.png",
        "/1": "/2", "/2": "/3", "/3": "/a.png", "/0": "/1", "/loop": "/loop",
        "/host": f"https://evil.test:{https.port}/a.png?secret",
        "/port": f"https://{HOST}/a.png",
        "/plain": f"http://{http.netloc}/a.png",
        "/literal": "https://127.0.0.1/a.png",
        "/metadata": "https://metadata.test/latest",
        "/file": "file:///etc/passwd",
        "/user": f"https://user:pw@{https.netloc}/a.png",
        "/nonsense": "https://[",
    }  # fmt: skip
    https.answers |= {path: (302, {"Location": place}, b"") for path, place in places.items()}
    base = f"https://{https.netloc}"
    settings = {"allowed_url_hosts": (*sites.hosts, "metadata.test")}
    for path in ("/relative", "/absolute", "/1"):
        assert get(base + path, outside, **settings) == PNG
    for path, message in {
        "/0": "more than 3 redirects (multimodal.max_url_redirects)",
        "/loop": "more than 3 redirects",
        "/host": "which redirects: host 'evil.test",
        "/port": "which redirects: host 'images.test' is not allowed",
        "/plain": "which redirects: plain http is not allowed",
        "/literal": "which redirects: host '127.0.0.1' is not allowed",
        "/metadata": "'metadata.test' is not at a public address",
        "/file": "which redirects: scheme 'file' is not supported",
        "/user": "without user name or password",
        "/nonsense": "is not allowed",
    }.items():
        error = refused(base + path, outside, **settings)
        assert message in error.message, path
        assert "secret" not in error.message
    assert http.asked == []
    assert "more than 0 redirects" in refused(f"{base}/relative", outside, **settings, max_url_redirects=0).message


def test_size_is_limited_before_and_while_it_is_read(sites: Sites):
    sent = []

    def endless(handler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while True:
            handler.wfile.write(b"x" * 65536)
            sent.append(65536)

    bomb = gzip.compress(b"x" * 3_000_000)
    sites.https.answers |= {
        "/announced": (200, {"Content-Length": "300000000"}, b""),
        "/endless": endless,
        "/packed": (200, {"Content-Encoding": "gzip"}, bomb),
    }
    settings = {"allowed_url_hosts": sites.hosts, "max_image_bytes": 200_000}
    base = f"https://{sites.https.netloc}"
    assert "has 300,000,000 bytes: at most 200,000" in refused(f"{base}/announced", loopback(sites), **settings).message
    assert "more than 200,000 bytes" in refused(f"{base}/endless", loopback(sites), **settings).message
    assert sum(sent) < 20_000_000  # what the sockets' buffers hold
    assert get(f"{base}/packed", loopback(sites), **settings) == bomb  # not unpacked


def test_time_is_limited_in_all(sites: Sites):
    def silent(handler) -> None:
        handler.rfile.read(1)

    sites.https.answers |= {"/trickle": trickle, "/silent": silent}
    settings = {"allowed_url_hosts": sites.hosts, "url_timeout_s": 0.7}
    for path in ("/trickle", "/silent"):
        begin = time.monotonic()
        error = refused(f"https://{sites.https.netloc}{path}", loopback(sites), **settings)
        assert "not there within 0.7 s (multimodal.url_timeout_s)" in error.message
        assert time.monotonic() - begin < 5

    async def slow(host: str, port: int) -> list[str]:
        await asyncio.sleep(60)
        return []

    assert "within 0.7 s" in refused(f"https://{sites.https.netloc}/a", Network(resolve=slow), **settings).message


def test_so_many_at_a_time(sites: Sites):
    running, most = 0, 0

    async def count(host: str, port: int) -> list[str]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return ["127.0.0.1"]

    async def run() -> list[bytes]:
        settings = MultimodalSettings(allowed_url_hosts=sites.hosts, max_url_fetches=2)
        fetcher = ImageFetcher(settings, Network(count, lambda address: True, sites.trusted))
        url = f"https://{sites.https.netloc}/a.png"
        return await asyncio.gather(*(fetcher.fetch(url, lambda size: None) for _ in range(6)))

    assert asyncio.run(run()) == [PNG] * 6
    assert most == 2


def test_what_is_not_there(sites: Sites):
    sites.https.answers |= {"/broken": (500, {}, b""), "/empty": (302, {}, b"")}
    settings = {"allowed_url_hosts": sites.hosts}
    base = f"https://{sites.https.netloc}"
    for path, status in (("/missing", 404), ("/broken", 500), ("/empty", 302)):
        assert (
            f"its server answered {status}, expected 200" in refused(base + path, loopback(sites), **settings).message
        )
    nobody = Network(resolve=Names({HOST: [[]]}))
    assert "is not at a public address" in refused(f"{base}/a.png", nobody, **settings).message


def test_urls_are_not_logged(sites: Sites, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        refused(f"https://{sites.https.netloc}/missing?token=hush", loopback(sites), allowed_url_hosts=sites.hosts)
    assert sites.https.asked[-1][1] == "/missing?token=hush"
    assert "hush" not in caplog.text
