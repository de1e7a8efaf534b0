"""Checks the settings of a Serve config file: `python -m configs.check CONFIG.yaml`.

`make serve` runs it first: Serve itself reports a wrong setting as a failed task, cut short, and goes on waiting.
"""

import argparse
import sys
from collections.abc import Sequence

from configs.engine import ConfigError, load_config


def main(arguments: Sequence[str] | None = None) -> None:
    """Exits with every wrong key in words, or says nothing."""
    parser = argparse.ArgumentParser(prog="python -m configs.check", description="Check a Serve config file.")
    parser.add_argument("config")
    options = parser.parse_args(arguments)
    try:
        load_config(options.config)
    except ConfigError as error:
        sys.exit(f"{options.config}:\n{error}")


if __name__ == "__main__":
    main()
