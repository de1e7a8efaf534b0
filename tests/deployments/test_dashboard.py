"""Ray's dashboard behind its port, from the first visit on."""

from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
import ray
from ray._private import worker

from deployments.dashboard import DashboardOnDemand


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield worker._global_node
    ray.shutdown()


def dashboards() -> int:
    """Processes of the dashboard's modules."""
    names = ["".join(child.cmdline()[:1]) for child in psutil.Process().children(recursive=True)]
    return sum(name.startswith("ray-dashboard-") for name in names)


def test_the_first_visit_starts_it(node: Any) -> None:
    dashboard = DashboardOnDemand(node)
    dashboard.start()
    assert dashboards() == 0
    page = httpx.get(dashboard.address, timeout=60)
    assert page.status_code == 200
    assert "Ray Dashboard" in page.text
    modules = dashboards()
    assert modules > 0
    assert httpx.get(f"{dashboard.address}/api/serve/applications/", timeout=60).status_code in (200, 401)
    assert dashboards() == modules


def test_on_another_port_where_its_own_is_taken(node: Any) -> None:
    first, second = DashboardOnDemand(node), DashboardOnDemand(node)
    assert first.address != second.address
