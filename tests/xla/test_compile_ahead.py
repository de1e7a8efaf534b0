"""`make compile` on the XLA device: the cache is filled, a later process finds its graphs there, and a gap is named.

torch_xla 2.9 cannot load a program again on its CPU device: a later process finds the file and compiles anew. What is
seen here is that it looks for the very programs that were compiled.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.engine import ROOT

pytestmark = pytest.mark.xla

SETTINGS: dict[str, Any] = {
    "model": {"max_model_len": 256, "dtype": "float32"},
    "parallel": {"world_size": 1, "device": "neuron"},
    "kv_cache": {"num_blocks": 32},
    "encoder_cache": {"num_blocks": 8},
    "scheduler": {"max_num_seqs": 1, "max_num_batched_tokens": 32},
}
WARM_UP = """
import sys
import torch_xla.debug.metrics as counts
from actors.messages import WarmUp
from actors.model_runner import ModelRunner
from actors.pixels import PixelMailbox
from actors.plan import make_plan
from configs.engine import load_config
from neuron.collectives import create_collectives
from telemetry.recorder import Recorder
plan = make_plan(load_config(sys.argv[1]))
runner = ModelRunner(plan, create_collectives("gloo", 0, 1, "", 5.0), PixelMailbox(), Recorder(()))
runner.warm_up(WarmUp(step_id=-1, bucket="decode/1x256"))
print("missed", counts.counter_value("PersistentCacheMiss") or 0)
print("found", counts.counter_value("PersistentCacheDeserializeFailure") or 0)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)


@pytest.mark.timeout(600)
def test_a_configuration_is_compiled_once_and_required_later(tmp_path: Path) -> None:
    tree = SETTINGS | {
        "compiler": {"cache_dir": str(tmp_path / "cache"), "require_compiled": True},
        "buckets": {"vision_patches": [1664]},
    }
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"applications": [{"args": tree}]}))
    refused = run("-c", WARM_UP, str(config))
    assert "7 of 7 graphs are not compiled" in refused.stderr
    assert not (tmp_path / "cache").exists()

    made = run("-m", "actors.compile", str(config))
    assert made.returncode == 0, made.stderr
    assert "7 of 7: sample_penalties/1 in" in made.stdout
    (written,) = (tmp_path / "cache" / "trn-vision-serve").iterdir()
    listed = json.loads(written.read_text())
    assert all(listed.values()), "a graph that added no program to the cache"

    served = run("-c", WARM_UP, str(config))
    assert served.returncode == 0, served.stderr
    assert "missed 0" in served.stdout, served.stdout
    assert "found 0" not in served.stdout

    (tmp_path / "cache" / listed["prefill_images/32x256"][0]).unlink()
    refused = run("-c", WARM_UP, str(config))
    assert "1 of 7 graphs are not compiled" in refused.stderr
    assert "prefill_images/32x256; run `make compile`" in refused.stderr
