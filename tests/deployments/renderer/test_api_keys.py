"""With API keys only who has one is heard; and no log says what was asked."""

import hmac
import logging
import socket
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from configs.engine import ConfigError, ServerSettings
from deployments.renderer.api_keys import ApiKeys
from tests.deployments.renderer.conftest import Served, data_url, encoded, picture
from tests.deployments.renderer.fake_engine import say
from tests.deployments.renderer.test_errors import HELLO, check_shape, image_message

KEYS = ["sk-first", "sk-second#1", "from-variable"]
ENDPOINTS = [
    *[("POST", path) for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")],
    *[("POST", f"/reset_{name}_cache") for name in ("prefix", "mm", "encoder")],
    *[("GET", path) for path in ("/v1/models", "/v1/models/digits-vl", "/version", "/metrics", "/openapi.json")],
    *[("GET", path) for path in ("/nothing", "/health/", "//health", "/health/x")],
]


@pytest.fixture(scope="module")
def keyed(serve: Callable[..., Served], tmp_path_factory: pytest.TempPathFactory) -> Served:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# tenants\nsk-first\n\n  sk-second#1  \n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TVS_TEST_KEYS", "from-variable, other")
        settings = {"api_keys_file": str(file), "api_keys_variable": "TVS_TEST_KEYS", "development_mode": True}
        return serve(model={"max_model_len": 512}, server=settings)


def client_of(served: Served, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0, timeout=20)


@pytest.mark.parametrize(("method", "path"), ENDPOINTS)
def test_without_a_key_nothing_is_served(keyed: Served, method, path):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sk-first"}, {"X-Api-Key": "sk-first"}):
        response = keyed.http.request(method, path, headers=headers, content=b"x" * 100)
        error = check_shape(response, 401)
        assert (error["type"], error["code"], error["param"]) == ("authentication_error", "invalid_api_key", None)
        assert response.headers["www-authenticate"] == "Bearer"
        assert "wrong" not in response.text
    assert keyed.engine.requests == keyed.engine.resets == []


def test_health_stays_open(keyed: Served):
    assert keyed.http.get("/health").status_code == 200
    assert keyed.http.post("/health").status_code == 405


@pytest.mark.parametrize("key", KEYS)
def test_every_key_opens_everything(keyed: Served, key):
    assert client_of(keyed, key).models.list().data[0].id == "digits-vl"
    assert client_of(keyed, key).chat.completions.create(model="digits-vl", messages=HELLO).choices
    assert keyed.http.get("/metrics", headers={"Authorization": f"bearer {key}"}).text == "a_metric 1\n"
    keyed.engine.requests.clear()


@pytest.mark.parametrize("key", ["sk-firs", "sk-firstt", "SK-FIRST", "sk-second", "# tenants", "other,", "x" * 60_000])
def test_what_is_nearly_a_key_is_none(keyed: Served, key):
    with pytest.raises(openai.AuthenticationError, match="not one of this server's") as raised:
        client_of(keyed, key).models.list()
    assert raised.value.code == "invalid_api_key"


def test_a_body_is_not_read_from_who_has_no_key(keyed: Served):
    with socket.create_connection(("127.0.0.1", int(keyed.url.rpartition(":")[2])), timeout=5) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        assert b" 401 " in connection.recv(1000).split(b"\r\n")[0]


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch):
    """Every key is compared, in full and as digests, whichever matches."""
    compared = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: (compared.append((len(a), len(b))), a == b)[1])
    keys = ApiKeys(KEYS)
    answers = [keys.accepts(f"Bearer {key}".encode()) for key in (KEYS[0], KEYS[2], "a", "sk-firsx")]
    assert answers == [True, True, False, False]
    assert compared == [(32, 32)] * len(KEYS) * 4


def test_a_place_without_a_key_stops_the_start(tmp_path: Path):
    empty, binary, secret = tmp_path / "empty", tmp_path / "binary", tmp_path / "secret"
    empty.write_text("# none\n\n")
    binary.write_bytes(b"\xff\xfe\0")
    secret.write_text("good\nhush hush\n")
    for settings, message in (
        (ServerSettings(api_keys_file=str(empty)), "server.api_keys_file = .* holds no key"),
        (ServerSettings(api_keys_file=str(tmp_path / "missing")), "FileNotFoundError: expected a readable text file"),
        (ServerSettings(api_keys_file=str(binary)), "UnicodeDecodeError"),
        (ServerSettings(api_keys_file=str(secret)), "key 2: expected printable ASCII characters without spaces"),
        (ServerSettings(api_keys_variable="UNSET"), "server.api_keys_variable = 'UNSET': it holds no key"),
    ):
        with pytest.raises(ConfigError, match=message) as raised:
            ApiKeys.load(settings, {})
        assert "hush" not in str(raised.value)
    assert ApiKeys.load(ServerSettings(), {"TVS_TEST_KEYS": "x"}) is None


@pytest.mark.parametrize(
    ("setting", "with_keys", "status"),
    [("open", True, 200), ("off", True, 401), ("off", False, 403), ("key", False, 200)],
)
def test_metrics_have_a_switch_of_their_own(serve, tmp_path, setting, with_keys, status):
    (tmp_path / "keys").write_text("k")
    keys = {"api_keys_file": str(tmp_path / "keys")} if with_keys else {}
    served = serve(server={"metrics": setting, **keys})
    response = served.http.get("/metrics")
    assert response.status_code == status
    if status == 403:
        assert "server.metrics" in check_shape(response, 403)["message"]
    if with_keys:
        assert served.http.get("/metrics", headers={"Authorization": "Bearer k"}).status_code == (
            403 if setting == "off" else 200
        )


def test_the_document_names_the_key(keyed: Served, served: Served):
    document = keyed.http.get("/openapi.json", headers={"Authorization": f"Bearer {KEYS[0]}"}).json()
    assert document["security"] == [{"key": []}]
    assert "security" not in served.http.get("/openapi.json").json()


SECRET = "hush-4711"


def ask_everything(served: Served, secret: str) -> list[int]:
    """Requests that succeed and fail in every way, with a secret in whatever a client may write; their statuses."""
    picture_url = data_url(encoded(picture(), "PNG") + secret.encode())
    bodies: list[tuple[str, dict]] = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": secret}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": secret}], "stream": True}),
        ("/v1/chat/completions", {"messages": image_message(picture_url)}),
        ("/v1/chat/completions", {"messages": image_message(f"data:image/png;base64,{secret}")}),
        ("/v1/chat/completions", {"messages": image_message(f"https://{secret}.org/{secret}")}),
        ("/v1/chat/completions", {"messages": secret}),
        ("/v1/chat/completions", {"messages": [{"role": secret, "content": secret}]}),
        ("/v1/chat/completions", {"messages": HELLO, secret: secret}),
        ("/v1/chat/completions", {"messages": HELLO, "model": secret}),
        ("/v1/chat/completions", {"messages": HELLO, "user": secret, "stop": secret, "cache_salt": secret}),
        ("/v1/completions", {"prompt": secret}),
        ("/tokenize", {"prompt": secret}),
    ]
    headers = {"Authorization": f"Bearer {secret}"}
    statuses = [served.http.post(path, json=body, headers=headers).status_code for path, body in bodies]
    statuses.append(served.http.post("/v1/completions", content=f'{{"{secret}'.encode()).status_code)
    return statuses


@pytest.mark.parametrize("works", [True, False])
def test_no_log_holds_what_a_client_wrote(served: Served, tokenizer, caplog: pytest.LogCaptureFixture, works):
    def broken(request) -> list:
        return [RuntimeError("a bug")]

    served.engine.script = say(tokenizer.encode(SECRET)) if works else broken
    loggers = [logging.getLogger(name) for name in (None, "trn_vision_serve", "uvicorn", "uvicorn.error", "httpx")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.DEBUG)
        logger.propagate = True
    try:
        statuses = ask_everything(served, SECRET)
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.propagate = propagate
    assert set(statuses) == ({200, 400, 404} if works else {200, 400, 404, 500})
    assert works or "a bug" in caplog.text  # the failure itself is logged
    of_client = [record for record in caplog.records if record.name.split(".")[0] in ("httpx", "httpcore")]
    ours = [record for record in caplog.records if record not in of_client]
    assert SECRET not in "\n".join(f"{record.getMessage()} {record.exc_text}" for record in ours)


def test_prompts_are_logged_where_a_setting_says_so(serve, caplog: pytest.LogCaptureFixture, monkeypatch):
    monkeypatch.setattr(logging.getLogger("trn_vision_serve"), "propagate", True)
    served = serve(debug={"log_prompts": True})
    with caplog.at_level(logging.INFO, "trn_vision_serve"):
        parts = [*image_message(data_url(encoded(picture())))[0]["content"], {"type": "text", "text": SECRET}]
        served.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}]})
    (line,) = [record.getMessage() for record in caplog.records if SECRET in record.getMessage()]
    mm_hash = served.engine.requests[0].mm_items[0].mm_hash
    assert f"<|vision_start|><image {mm_hash}><|vision_end|>{SECRET}<|im_end|>" in line
    assert line.startswith(f"request {served.engine.requests[0].request_id[:-2]}: prompt 0 = ")
