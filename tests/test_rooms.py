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


def test_a_renderer_loads_no_torch() -> None:
    """Nothing imports transformers before its checkpoint is loaded, which hides torch: 300 MB and seconds."""
    code = (
        "import sys, numpy; from PIL import Image; import deployments.renderer.deployment\n"
        "from deployments.renderer.routes import build_api; from deployments.renderer.serving import Renderer\n"
        "from deployments.renderer.checkpoint import load_checkpoint; from configs.engine import parse_config\n"
        "from deployments.renderer.processor import ImageProcessor\n"
        "assert 'transformers' not in sys.modules\n"
        "processor = ImageProcessor(load_checkpoint(parse_config({}), hide_torch=True).image_processor, 'm')\n"
        "processor.process(Image.new('RGB', (64, 50)))\n"
        "print([m for m in ('torch', 'torchvision', 'scipy') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "[]"
