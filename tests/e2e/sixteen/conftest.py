"""The application of serve_config.yaml: sixteen ranks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import DEBUG
from tests.support.application import Application, behind_haproxy

FILE_KEY, VARIABLE_KEY = "sk-of-the-file-5501", "sk-of-the-variable-5502"
KEYS_VARIABLE = "TVS_E2E_KEYS"


@pytest.fixture(scope="package")
def sixteen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    """The application of serve_config.yaml behind HAProxy, as `make serve` runs it, started once for all tests.

    Its tokens travel as they do between nodes, those of the other applications as on one. It wants API keys.
    """
    folder = Path(tmp_path_factory.mktemp("sixteen"))
    (folder / "keys").write_text(FILE_KEY)
    environment = behind_haproxy() | {
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",  # what a log holds is in its file
        KEYS_VARIABLE: VARIABLE_KEY,
    }
    server = {"engine_channel": "serve", "api_keys_file": str(folder / "keys"), "api_keys_variable": KEYS_VARIABLE}
    changes = DEBUG | {"server": DEBUG["server"] | server}
    with Application("serve_config.yaml", changes, folder / "serve.log", environment, api_key=FILE_KEY) as application:
        yield application
