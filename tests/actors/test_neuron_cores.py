"""What a gang is told about the NeuronCores that it was given, with a fake `neuron-ls`."""

import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from actors import neuron_cores
from actors.neuron_cores import (
    InstanceFacts,
    check_gang,
    core_order,
    format_cores,
    parse_cores,
    parse_instance,
    read_instance,
    root_address,
    runtime_environment,
    set_runtime_environment,
)
from actors.plan import make_plan
from configs.engine import ConfigError, parse_config
from tests.support import fake_neuron_ls

TRN2 = InstanceFacts("trn2.48xlarge", cores=64, logical_neuroncore_config=2)


def one_each(*cores: int) -> list[tuple[int, ...]]:
    return [(core,) for core in cores]


def refusal(
    cores: list[tuple[int, ...]], facts: InstanceFacts = TRN2, setting: int = 2, variable: str | None = None
) -> str:
    with pytest.raises(ConfigError) as caught:
        check_gang(cores, facts, setting, variable)
    return str(caught.value)


@pytest.mark.parametrize(
    ("visible", "cores", "written"),
    [
        (None, (), "none"),
        ("", (), "none"),
        ("7", (7,), "7"),
        ("0,1", (0, 1), "0-1"),
        ("0-3,8", (0, 1, 2, 3, 8), "0-3,8"),
        (" 9, 2-4 ", (9, 2, 3, 4), "2-4,9"),
    ],
)
def test_visible_cores(visible: str | None, cores: tuple[int, ...], written: str) -> None:
    assert parse_cores(visible) == cores
    assert format_cores(cores) == written


@pytest.mark.parametrize("visible", ["all", "0-", "-3", "0..3", "1;2"])
def test_visible_cores_that_mean_nothing(visible: str) -> None:
    with pytest.raises(ConfigError, match=r"NEURON_RT_VISIBLE_CORES = .*expected core ids and ranges, such as 0-3,8"):
        parse_cores(visible)


@pytest.mark.parametrize(("lnc", "cores"), [(2, 64), (1, 128)])
def test_the_instance(lnc: int, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fake_neuron_ls.install(tmp_path, fake_neuron_ls.trn2_48xlarge(lnc))
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    assert read_instance() == InstanceFacts("trn2.48xlarge", cores, lnc)


def test_an_older_neuron_ls_says_less() -> None:
    output = '[{"neuron_device": 0, "nc_count": 2, "connected_to": null}, {"neuron_device": 1, "nc_count": 2}]'
    assert parse_instance(output) == InstanceFacts("this instance", 4, None)


@pytest.mark.parametrize("output", ["", "[]", "{}", "no devices", '[{"neuron_device": 0}]', "[4]"])
def test_a_neuron_ls_that_says_something_else(output: str) -> None:
    with pytest.raises(ConfigError, match="expected a list of devices with nc_count"):
        parse_instance(output)


def test_a_neuron_ls_that_is_missing_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(neuron_cores, "_TOOLS", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"neuron-ls is neither on PATH .*; install aws-neuronx-tools on every node.*device: cpu"
    ):
        read_instance()
    (tmp_path / "neuron-ls").write_text("#!/bin/sh\necho no driver >&2\nexit 3\n")
    (tmp_path / "neuron-ls").chmod(0o755)
    with pytest.raises(ConfigError, match=r"neuron-ls --json-output failed .* status 3.* no driver; run it by hand"):
        read_instance()


@pytest.mark.parametrize("first", [0, 16, 48])
def test_a_gang_that_can_run(first: int) -> None:
    check_gang(one_each(*range(first, first + 16)), TRN2, 2, None)
    check_gang(one_each(*reversed(range(first, first + 16))), TRN2, 2, "2")
    check_gang(one_each(first + 1), TRN2, 2, "2")


def test_a_gang_on_an_instance_without_lnc() -> None:
    check_gang(one_each(0, 1), InstanceFacts("trn1.32xlarge", 32, None), 2, None)


REFUSED: list[tuple[list[tuple[int, ...]], str]] = [
    ([(0,), ()], "rank 1 was given NeuronCores none, expected one; .* unset RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE"),
    ([(0, 1, 2, 3), (4,)], "rank 0 was given NeuronCores 0-3, expected one; .* as a list without ranges"),
    (one_each(4, 5, 5, 6), "world_size = 4: .* NeuronCores 4-6, and more than one rank NeuronCore 5; .* let Ray"),
    (one_each(62, 63, 64, 65), "given NeuronCores 62-65, and trn2.48xlarge has 64, from 0; .* without neuron_cores in"),
    (one_each(0, 1, 3, 4), "given NeuronCores 0-1,3-4, which are not contiguous; stop the actors"),
    (one_each(2, 3, 4, 5), "given NeuronCores 2-5, which start at 2, expected a multiple of 4; .* ask for 4 neuron_"),
]


@pytest.mark.parametrize(("cores", "sentence"), REFUSED)
def test_a_gang_that_cannot_run(cores: list[tuple[int, ...]], sentence: str) -> None:
    assert re.search(sentence, refusal(cores))


def test_a_logical_core_of_another_size() -> None:
    by_variable = refusal(one_each(0), variable="1")
    assert by_variable.startswith("parallel.logical_neuroncore_config = 2: NEURON_LOGICAL_NC_CONFIG in the ranks'")
    assert "says 1; set NEURON_LOGICAL_NC_CONFIG=2 where `ray start` runs, on every node, or change" in by_variable
    by_tool = refusal(one_each(0), setting=1, variable="1")
    assert by_tool.startswith("parallel.logical_neuroncore_config = 1: neuron-ls on trn2.48xlarge says 2; set")


@pytest.mark.parametrize(
    ("parallel", "sentence"),
    [
        (
            {"device": "cpu", "collectives": "xla"},
            "parallel.collectives = 'xla': .* expected auto, shared_memory or gloo",
        ),
        ({"logical_neuroncore_config": 3}, "parallel.logical_neuroncore_config = 3: Input should be 1 or 2"),
    ],
)
def test_settings_that_do_not_go_together(parallel: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_plan(parse_config({"parallel": parallel}))


def test_ranks_follow_the_cores() -> None:
    assert core_order(one_each(5, 4, 7, 6)) == [1, 0, 3, 2]


def test_the_runtime_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    root = root_address("10.0.0.7", range(16, 32))
    assert root == "10.0.0.7:62198"
    assert root != root_address("10.0.0.7", range(16))  # two gangs of one instance
    variables = runtime_environment(3, 4, root, (19,))
    assert variables == {
        "PJRT_DEVICE": "NEURON",
        "NEURON_RT_VISIBLE_CORES": "19",
        "NEURON_RT_ROOT_COMM_ID": root,
        "NEURON_PJRT_PROCESS_INDEX": "3",
        "NEURON_PJRT_PROCESSES_NUM_DEVICES": "1,1,1,1",
        "RANK": "3",
        "LOCAL_RANK": "3",
    }
    environment: dict[str, Any] = {}
    monkeypatch.setattr(os, "environ", environment)
    set_runtime_environment(variables)
    assert environment == variables
    monkeypatch.setitem(sys.modules, "torch_xla", ModuleType("torch_xla"))
    with pytest.raises(RuntimeError, match="torch_xla was imported before"):
        set_runtime_environment(variables)
