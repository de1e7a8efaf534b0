"""Which kernels the machine that runs the tests can run."""

import pytest

from neuron.amx.library import AmxError, library


def amx_error() -> str | None:
    """Why the kernels for AMX cannot run here."""
    try:
        library()
    except AmxError as error:
        return str(error)
    return None


def marks_of(kernels: str) -> list[pytest.MarkDecorator]:
    """To skip on a machine that lacks AMX; the kernels must have been built where it has."""
    error = amx_error() if kernels == "amx" else None
    return [pytest.mark.skip(reason=error)] if error and "CPU" in error else []
