"""VLLM_MM_CACHE_PROBE=1: one log line per lookup of a media item, in every cache layer that looks it up."""

import logging
import os
from collections.abc import Callable
from typing import Literal

from telemetry.logs import LOGGER_NAME

VARIABLE = "VLLM_MM_CACHE_PROBE"

Probe = Callable[[bool, str, str], None]
"""(hit, mm_hash, request_id)"""


def environment() -> dict[str, str]:
    """The variable, for another process of the application, if it is set here."""
    return {VARIABLE: os.environ[VARIABLE]} if VARIABLE in os.environ else {}


def mm_cache_probe(layer: Literal["processor", "scheduler", "device"]) -> Probe | None:
    """What a layer calls at each lookup; None when the probe is off, so that a lookup costs one comparison more."""
    if os.environ.get(VARIABLE, "0") != "1":
        return None
    logger = logging.getLogger(LOGGER_NAME)

    def probe(hit: bool, mm_hash: str, request_id: str) -> None:
        result = "HIT" if hit else "MISS"
        logger.info("mm_cache_probe layer=%s result=%s mm_hash=%s request_id=%s", layer, result, mm_hash, request_id)

    return probe
