"""A real HTTPS or HTTP server of images on a loopback address, and a Network in which names lead there."""

import datetime
import http.server
import ipaddress
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from deployments.renderer.network import Network, is_public

Answer = tuple[int, Mapping[str, str], bytes] | Callable[[http.server.BaseHTTPRequestHandler], None]


@dataclass
class Site:
    """What it was asked, and at which address."""

    host: str
    port: int
    answers: dict[str, Answer] = field(default_factory=dict)
    """Path -> (status, headers, body), or a function that answers by itself."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """(the client's Host header, path)."""

    @property
    def netloc(self) -> str:
        return f"{self.host}:{self.port}"


@contextmanager
def serving(host: str, address: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> Iterator[Site]:
    """A server that answers as `host` at `address`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            site.asked.append((self.headers["Host"], self.path))
            answer = site.answers.get(self.path, (404, {}, b""))
            with suppress(OSError):  # the client may leave at any time
                if callable(answer):
                    answer(self)
                    return
                status, headers, body = answer
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            pass  # a handshake that the client refused

    server = Server((address, 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    site = Site(host, server.server_port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def certificate(hosts: Sequence[str], folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """(the server's context, the client's that trusts it) of a self-signed certificate for `hosts`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, hosts[0])])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = folder / "cert.pem", folder / "key.pem"
    cert_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert_file, key_file)
    return server, ssl.create_default_context(cafile=str(cert_file))


class Names:
    """A resolver: name -> addresses, one answer after another, the last for ever."""

    def __init__(self, answers: Mapping[str, Sequence[Sequence[str]]]) -> None:
        self._answers = {name: list(each) for name, each in answers.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        with suppress(ValueError):
            return [str(ipaddress.ip_address(host))]
        answers = self._answers[host]
        return list(answers.pop(0) if len(answers) > 1 else answers[0])


def network(
    names: Names, trusted: ssl.SSLContext | None = None, also_allowed: Sequence[str] = ("127.0.0.1",)
) -> Network:
    """The internet's rules, and beside its addresses those of the test's own servers."""
    return Network(names, lambda address: address in also_allowed or is_public(address), trusted)


def trickle(handler: http.server.BaseHTTPRequestHandler) -> None:
    """Two bytes a tenth of a second, without end."""
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b"xx")
        handler.wfile.flush()
        time.sleep(0.1)
