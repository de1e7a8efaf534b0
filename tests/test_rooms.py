"""Imports between the rooms run one way, and the plain parts stay plain."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
IMPORT = re.compile(r"^\s*(?:from|import)\s+([\w.]+)")
ROOMS = ("configs", "telemetry", "neuron", "actors", "deployments")


def imports_of(file: Path) -> set[str]:
    """Every module that a file imports, at any depth."""
    return {module for line in file.read_text().splitlines() for module in IMPORT.findall(line)}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_above_it(room: str) -> None:
    allowed = set(ROOMS[: ROOMS.index(room) + 1])
    files = list((ROOT / room).rglob("*.py"))
    assert files
    for file in files:
        rooms = {module.split(".")[0] for module in imports_of(file)} & {*ROOMS, "tests", "benchmarks"}
        assert rooms <= allowed, f"{file.relative_to(ROOT)} imports {sorted(rooms - allowed)}"


def test_one_module_imports_what_pypi_does_not_have() -> None:
    importers = {
        str(file.relative_to(ROOT))
        for room in ROOMS
        for file in (ROOT / room).rglob("*.py")
        if {module.split(".")[0] for module in imports_of(file)} & {"torch_xla", "torch_neuronx", "libneuronxla"}
    }
    assert importers == {"neuron/device/xla_imports.py"}


PLAIN = (
    "actors.memory_plan",
    "actors.messages",
    "actors.neuron_cores",
    "actors.plan",
    "configs.engine",
    "deployments.scheduler.scheduler",
    "deployments.scheduler.engine",
    "neuron.encoder_cache_blocks",
    "neuron.vision_packing",
)


@pytest.mark.parametrize("module", PLAIN)
def test_plain_modules_import_neither_ray_nor_torch(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('ray', 'torch', 'transformers') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "[]"


def test_a_rank_imports_neither_transformers_nor_fastapi() -> None:
    code = (
        "import sys, actors.rank_actor, actors.model_runner, neuron.models.qwen3_vl.model; "
        "print([m for m in ('transformers', 'fastapi', 'ray.serve') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "[]"
