"""The OpenAPI document against the application: what it allows, and what it forbids, is answered as it says."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.fuzz.conftest import Fuzzed, cases

pytestmark = pytest.mark.timeout(900)

CHECKS = [
    content_type_conformance,
    negative_data_rejection,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
]
PATHS = {
    "/v1/chat/completions": 0.07,
    "/v1/completions": 0.03,
    "/tokenize": 0.02,
    "/detokenize": 0.01,
    "/v1/models/{name}": 0.005,
    **dict.fromkeys(("/v1/models", "/health", "/version", "/metrics"), 0.0001),
    **dict.fromkeys((f"/reset_{name}_cache" for name in ("prefix", "mm", "encoder")), 0.0001),
}
"""Every path of the document, and its share of all cases in each mode."""


@pytest.fixture(scope="module")
def document(fuzzed: Fuzzed) -> BaseSchema:
    return schemathesis.openapi.from_asgi("/openapi.json", fuzzed.stack.api)


def test_every_path_is_tried(document: BaseSchema) -> None:
    assert set(document) == set(PATHS)


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("path", PATHS)
def test_document(document: BaseSchema, path: str, mode: GenerationMode) -> None:
    (operation,) = document[path].values()
    if mode is GenerationMode.NEGATIVE and not operation.body:
        return  # nothing can be wrong: the only other parameter is a name in a path, any text

    @settings(max_examples=cases(PATHS[path]), deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
    @given(operation.as_strategy(mode))
    def run(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS)

    run()
