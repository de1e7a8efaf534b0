"""The application of serve_config.yaml: sixteen ranks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import DEBUG
from tests.support.application import Application, free_port


@pytest.fixture(scope="package")
def sixteen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    """The application of serve_config.yaml behind HAProxy, as `make serve` runs it, started once for all tests."""
    log = Path(tmp_path_factory.mktemp("sixteen")) / "serve.log"
    environment = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
    }
    with Application("serve_config.yaml", DEBUG, log, environment) as application:
        yield application
