"""The application's own logger: one line per event on standard error, which Ray forwards to the driver."""

import logging
import sys

LOGGER_NAME = "trn_vision_serve"


def configure() -> logging.Logger:
    """Set the logger up in this process; calling it again changes nothing."""
    logger = logging.getLogger(LOGGER_NAME)
    if not logger.handlers:
        # Serve may send a replica's sys.stderr to a file; this one is the process's own.
        handler = logging.StreamHandler(sys.__stderr__)
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger
