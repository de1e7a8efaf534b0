"""Everything here carries the marker `loss`: `make test-loss` runs it."""

import pytest

from tests.support.faults import Faults


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/loss" in str(item.path):
            item.add_marker(pytest.mark.loss)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return Faults(tmp_path_factory.mktemp("faults"))
