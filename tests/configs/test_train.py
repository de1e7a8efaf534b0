"""The demo checkpoint's training script, for a few steps: killed, it resumes; and it exports a folder that loads."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

from tests.support.application import ROOT

SCRIPT = ROOT / "configs" / "models" / "digits-vl" / "train.py"


def start(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), "--look-steps=9", "--talk-steps=3", "--all-steps=3", "--budget=200"]
    command += ["--save-every=2", "--eval-every=3", "--eval-samples=2", "--final-samples=6"]
    command += [f"--build={folder / 'build'}", f"--out={folder / 'out'}"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


@pytest.mark.slow
def test_it_resumes_and_exports(tmp_path: Path) -> None:
    process = start(tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if "look 6" in line:
            break
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()

    process = start(tmp_path)
    log, _ = process.communicate(timeout=300)
    assert process.returncode == 0, log
    assert "look 3 (" not in log  # that step was not made again
    assert "look 9 (" in log
    assert "talk 3 (" in log
    assert "all 3 (" in log
    summary = json.loads((tmp_path / "build" / "summary.json").read_text())
    assert summary["held_out"]["read"]["number"] > 0
    Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("7")
