"""The application of serve_config.yaml: sixteen ranks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import DEBUG
from tests.support.application import Application, free_port


@pytest.fixture(scope="package")
def sixteen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    """The application of serve_config.yaml behind HAProxy, as `make serve` runs it, started once for all tests.

    Its tokens travel as they do between nodes, those of the other applications as on one.
    """
    log = Path(tmp_path_factory.mktemp("sixteen")) / "serve.log"
    environment = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
    }
    changes = DEBUG | {"server": DEBUG["server"] | {"output_channel": "serve"}}
    with Application("serve_config.yaml", changes, log, environment) as application:
        yield application
