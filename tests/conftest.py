"""Shared by every test: metric files go to a folder of the test run's own."""

import os
import tempfile

# prometheus_client decides at import whether it writes to files.
os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", tempfile.mkdtemp(prefix="tvs-test-metrics-"))
