"""The line of statistics: rates over the interval, hit rates only where something was looked up."""

import logging
from collections.abc import Iterator

import pytest

from telemetry.logs import LOGGER_NAME
from telemetry.stat_logger import LoggingStatLogger, State, Traffic


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    logger = logging.getLogger(LOGGER_NAME)
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, LOGGER_NAME)
    yield
    logger.removeHandler(caplog.handler)


def test_one_line_per_interval_with_rates_over_it(caplog: pytest.LogCaptureFixture) -> None:
    log = LoggingStatLogger("0", 10, now=100)
    log.traffic = Traffic(prompt_tokens=3000, generation_tokens=120, prefix_queries=200, prefix_hits=150)
    log.traffic.mm_queries, log.traffic.mm_hits = 4, 1
    log.state = State(3, 2, 0.125, 8, 247, 0)
    log.log_if_due(109)
    assert not caplog.messages
    log.log_if_due(112)
    assert caplog.messages == [
        "Engine 000: Avg prompt throughput: 250.0 tokens/s, Avg generation throughput: 10.0 tokens/s, "
        "Running: 3 reqs, Waiting: 2 reqs, KV cache usage: 12.5%, Prefix cache hit rate: 75.0%, "
        "MM cache hit rate: 25.0%, Encoder cache blocks: 8 active / 247 free / 0 held"
    ]


def test_an_engine_that_has_gone_idle_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    log = LoggingStatLogger("0", 1, now=0)
    log.log_if_due(1)
    assert not caplog.messages
    log.traffic.generation_tokens = 5
    for now in (2, 3, 4, 5):
        log.log_if_due(now)
    assert [message.partition("generation throughput: ")[2].partition(" ")[0] for message in caplog.messages] == [
        "5.0",
        "0.0",
    ]
