"""The running application: sixteen ranks, digests compared after every step."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.application import Application, free_port
from tests.support.otlp_receiver import Receiver, receiving

DEBUG = {
    "debug": {"rank_digest": True, "check_invariants": True, "fail_on_new_shape": True},
    "server": {"development_mode": True},
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/e2e" in str(item.path):
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def sixteen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    """The application of serve_config.yaml behind HAProxy, as `make serve` runs it, started once for all tests.

    Its tokens travel as they do between nodes, those of the other applications as on one.
    """
    log = Path(tmp_path_factory.mktemp("sixteen")) / "serve.log"
    environment = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
    }
    changes = DEBUG | {"server": DEBUG["server"] | {"output_channel": "serve"}}
    with Application("serve_config.yaml", changes, log, environment) as application:
        yield application


@pytest.fixture(scope="session")
def otlp() -> Iterator[Receiver]:
    """A collector that takes the spans of `one_rank`."""
    with receiving() as receiver:
        yield receiver


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory, otlp: Receiver) -> Iterator[Application]:
    """The application of configs/laptop.yaml behind Serve's own proxy, as plain `serve run` runs it, watched."""
    log = Path(tmp_path_factory.mktemp("one-rank")) / "serve.log"
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": otlp.url,
        "OTEL_BSP_SCHEDULE_DELAY": "300",
        "RAY_metrics_report_interval_ms": "1000",
        "VLLM_MM_CACHE_PROBE": "1",
    }
    changes = DEBUG | {"telemetry": {"stats_interval_s": 2}}
    with Application("configs/laptop.yaml", changes, log, environment) as application:
        yield application
