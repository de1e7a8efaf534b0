"""Everything here carries the marker `loss`: `make test-loss` runs it."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/loss" in str(item.path):
            item.add_marker(pytest.mark.loss)
