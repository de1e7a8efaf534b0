"""The running application: sixteen ranks, digests compared after every step."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.application import Application

DEBUG = {"debug": {"rank_digest": True, "check_invariants": True}, "server": {"development_mode": True}}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/e2e" in str(item.path):
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def sixteen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    """The application of serve_config.yaml, started once for all tests."""
    log = Path(tmp_path_factory.mktemp("sixteen")) / "serve.log"
    with Application("serve_config.yaml", DEBUG, log) as application:
        yield application
