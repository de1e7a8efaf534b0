"""A fake `neuron-ls`: prints the JSON of a trn2.48xlarge, in the shape that AWS documents."""

import json
from pathlib import Path
from typing import Any


def trn2_48xlarge(lnc: int = 2) -> list[dict[str, Any]]:
    """16 devices of 8 physical cores in a 4 x 4 torus; core ids are logical."""
    cores = 8 // lnc
    return [
        {
            "instance_type": "trn2.48xlarge",
            "instance_id": "i-0123456789abcdef0",
            "neuron_device": device,
            "bdf": f"0000:{0xA0 + device:x}:00.0",
            "cpu_affinity": "0-47,96-143" if device < 8 else "48-95,144-191",
            "numa_node": "0" if device < 8 else "1",
            "connected_to": sorted(
                {(device + 4) % 16, (device - 4) % 16, *(device // 4 * 4 + (device + step) % 4 for step in (1, 3))}
            ),
            "nc_count": cores,
            "logical_neuroncore_config": lnc,
            "memory_size": 96 * 2**30,
            "neuroncore_ids": list(range(device * cores, device * cores + cores)),
            "neuron_processes": [],
        }
        for device in range(16)
    ]


def install(folder: Path, devices: list[dict[str, Any]]) -> Path:
    """Write the executable into `folder`, which the caller puts on PATH; returns the folder."""
    program = folder / "neuron-ls"
    program.write_text(
        '#!/bin/sh\n[ "$*" = --json-output ] || { echo "unknown arguments: $*" >&2; exit 2; }\n'
        f"cat <<'END'\n{json.dumps(devices, indent=4)}\nEND\n"
    )
    program.chmod(0o755)
    return folder
