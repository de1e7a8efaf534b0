"""These tests run on torch_xla's CPU device, in an environment of their own: `make test-xla`."""

import importlib.util
import os

os.environ.setdefault("PJRT_DEVICE", "CPU")

if importlib.util.find_spec("torch_xla") is None:
    collect_ignore_glob = ["test_*.py"]
