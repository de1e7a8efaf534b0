"""Compile ahead: what is listed, and what a start that requires it refuses. The compiler is a stand-in here."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from actors import compile as compile_ahead
from actors.compiled_graphs import CompiledGraphs, check_compiled, graphs_digest
from actors.messages import WarmUp
from actors.plan import EnginePlan, make_plan
from configs.engine import ConfigError, parse_config


def make(folder: Path, **sections: dict[str, Any]) -> EnginePlan:
    tree: dict[str, Any] = {
        "parallel": {"world_size": 1, "device": "neuron"},
        "compiler": {"cache_dir": str(folder), "require_compiled": True},
        "scheduler": {"max_num_seqs": 2, "max_num_batched_tokens": 128},
    }
    return make_plan(parse_config(tree | sections))


def compile_into(folder: Path, plan: EnginePlan) -> list[str]:
    """Compile with a stand-in that makes one file for each graph it has not made before. Returns what it ran."""
    ran: list[str] = []

    def run(command: WarmUp) -> float:
        ran.append(command.bucket)
        file = folder / "neuronxcc-0" / command.bucket.replace("/", "_") / "model.neff"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        return 0.5

    compile_ahead.compile_graphs(plan, graphs_digest(plan), run)
    return ran


def test_a_compiled_configuration_may_start_and_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = make(tmp_path)
    names = plan.bucket_names()
    with pytest.raises(ConfigError, match=rf"{len(names)} of {len(names)} graphs are not compiled in .*encode/128"):
        check_compiled(plan)
    assert compile_into(tmp_path, plan) == names
    assert f"{len(names)} graphs in " in capsys.readouterr().out
    check_compiled(plan)
    # Again: nothing new is made, and what was listed stays.
    compile_into(tmp_path, plan)
    check_compiled(plan)
    (tmp_path / "neuronxcc-0" / "decode_2x1024" / "model.neff").unlink()
    with pytest.raises(ConfigError, match=rf"1 of {len(names)} graphs are not compiled in .*: decode/2x1024; run"):
        check_compiled(plan)


def test_what_a_graph_is_compiled_from_has_a_list_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make(tmp_path)
    other = [
        make(tmp_path, model={"dtype": "float32"}),
        make(tmp_path, kv_cache={"block_size": 32}),
        make(tmp_path, encoder_cache={"num_blocks": 64}),
        make(tmp_path, parallel={"world_size": 2, "device": "neuron"}),
        make(tmp_path, scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 128}),
    ]
    digests = {graphs_digest(each) for each in (plan, *other)}
    assert len(digests) == 6
    monkeypatch.setenv("NEURON_CC_FLAGS", "--optlevel=1")
    assert graphs_digest(plan) not in digests
    monkeypatch.undo()
    # A bucket more is a graph more, in the same list.
    more = make(tmp_path, buckets={"prefill_tokens": [64, 128]})
    assert graphs_digest(more) == graphs_digest(plan)
    compile_into(tmp_path, plan)
    assert not CompiledGraphs(more, graphs_digest(more)).has("prefill/64x1024")
    assert CompiledGraphs(more, graphs_digest(more)).has("prefill/128x1024")


def test_the_requirement_needs_a_folder_and_the_cpu_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"compiler\.require_compiled = True: expected compiler\.cache_dir"):
        parse_config({"compiler": {"require_compiled": True}})
    check_compiled(make(tmp_path, parallel={"device": "cpu"}))
    with pytest.raises(ConfigError, match=r"compiler\.cache_dir = None"):
        CompiledGraphs(make(tmp_path, compiler={}), "")
    config = tmp_path / "cpu.yaml"
    config.write_text(yaml.safe_dump({"applications": [{"args": {"parallel": {"device": "cpu"}}}]}))
    compile_ahead.main([str(config)])
    assert "the cpu device compiles nothing" in capsys.readouterr().out
