"""Shared by every test: metric files go to a folder of the test run's own."""

import os
import tempfile

import pytest

# prometheus_client decides at import whether it writes to files.
os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", tempfile.mkdtemp(prefix="tvs-test-metrics-"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: with several workers no long one is then left to the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
