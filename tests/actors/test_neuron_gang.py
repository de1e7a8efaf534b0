"""A gang that asks Ray for NeuronCores: fake resources, a fake `neuron-ls`, and rank actors that load no model."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

import actors.rank_group
from actors.compile import compile_gang
from actors.compiled_graphs import check_compiled
from actors.messages import Command, RankOutput
from actors.plan import EnginePlan, make_plan
from actors.rank_actor import RankActor
from actors.rank_group import RankGroup
from configs.engine import ConfigError, parse_config
from tests.support import fake_neuron_ls

RANKS = 16


class StubRank(RankActor):
    """Learns its core and its rank as a rank does, then answers warm-ups without a model.

    Ray hands cores out in ascending order here; so that the order matters, each rank turns it round.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.given = ray.get_runtime_context().get_accelerator_ids()["neuron_cores"]
        os.environ["NEURON_RT_VISIBLE_CORES"] = str(RANKS - 1 - int(os.environ["NEURON_RT_VISIBLE_CORES"]))

    def load(self, collectives: str, rendezvous: str) -> dict[str, float]:
        self.loaded = (collectives, rendezvous)
        return {"seconds": 0.0, "bytes": 1.0}

    def _handle(self, command: bytes) -> bytes:
        message = msgspec.msgpack.decode(command, type=Command)
        return msgspec.msgpack.encode(
            RankOutput(step_id=message.step_id, rank=self.rank, timings={message.bucket: 0.0})  # type: ignore[union-attr]
        )

    def look(self) -> dict[str, Any]:
        import sys

        names = ("NEURON_RT_VISIBLE_CORES", "NEURON_RT_ROOT_COMM_ID", "NEURON_PJRT_PROCESS_INDEX")
        return {
            "pid": os.getpid(),
            "rank": self.rank,
            "given": self.given,
            "loaded": self.loaded,
            "torch": "torch" in sys.modules,
            "devices": os.environ["NEURON_PJRT_PROCESSES_NUM_DEVICES"],
            "variables": tuple(os.environ[name] for name in names),
        }


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = fake_neuron_ls.install(tmp_path_factory.mktemp("bin"), fake_neuron_ls.trn2_48xlarge())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        patch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)
        ray.init(num_cpus=RANKS + 1, resources={"neuron_cores": RANKS}, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


def neuron_plan(world_size: int, **sections: Any) -> EnginePlan:
    tree = {"model": {"max_model_len": 256}, "kv_cache": {"num_blocks": 64}, **sections}
    return make_plan(parse_config(tree | {"parallel": {"world_size": world_size, "device": "neuron"}}))


@pytest.mark.slow
def test_sixteen_ranks_follow_their_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.rank_group, "RankActor", StubRank)
    plan = neuron_plan(RANKS)
    assert plan.rank_bundle == {"CPU": 1.0, "neuron_cores": 1.0}
    bundles = placement_group([{"CPU": 0.1}] + [plan.rank_bundle] * RANKS, strategy="STRICT_PACK")
    group = RankGroup(plan, lambda *_: None, placement_group=bundles)
    group.start()
    ranks = ray.get([actor.look.remote() for actor in group._actors])
    root = f"{ray.util.get_node_ip_address()}:62182"
    assert [rank["rank"] for rank in ranks] == list(range(RANKS))
    assert [rank["pid"] for rank in ranks] == group._pids
    assert [rank["variables"] for rank in ranks] == [(str(rank), root, str(rank)) for rank in range(RANKS)]
    assert [rank["given"] for rank in ranks] == [[str(core)] for core in reversed(range(RANKS))]
    assert {rank["devices"] for rank in ranks} == {",".join(["1"] * RANKS)}
    assert {rank["loaded"][0] for rank in ranks} == {"xla"}
    assert len({rank["loaded"][1] for rank in ranks}) == 1
    assert ranks[0]["loaded"][1].startswith("tcp://")
    assert not any(rank["torch"] for rank in ranks)
    group.shutdown()
    remove_placement_group(bundles)


@pytest.mark.slow
def test_a_gang_is_compiled_ahead_and_a_rank_finds_its_graphs_listed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(actors.rank_group, "RankActor", StubRank)
    plan = neuron_plan(2, compiler={"cache_dir": str(tmp_path)})
    compile_gang(plan)
    with pytest.raises(ConfigError, match="graphs are not compiled"):
        check_compiled(plan)  # this process has other variables than a rank
    monkeypatch.setenv("PJRT_DEVICE", "NEURON")
    check_compiled(plan)


def test_ranks_on_another_node_are_refused() -> None:
    group = RankGroup(neuron_plan(2), lambda *_: None)
    here = ray.get_runtime_context().get_node_id()
    places = [{"node": node, "pid": 1, "cores": "0", "lnc": None} for node in (here, "elsewhere")]
    with pytest.raises(ConfigError, match=r"other nodes than their scheduler's; .* STRICT_PACK"):
        group._take_cores(places)


def test_cores_that_do_not_fit_stop_the_start_before_anything_loads() -> None:
    reported: list[str] = []
    while ray.available_resources().get("neuron_cores") != RANKS:  # those of the test before are killed, not yet gone
        time.sleep(0.05)
    other = ray.remote(RankActor).options(num_cpus=0, resources={"neuron_cores": 1}).remote(0, None, "other", {})
    assert ray.get(other.describe.remote())["cores"] == "0"
    group = RankGroup(neuron_plan(2), lambda stage, *_: reported.append(stage))
    with pytest.raises(ConfigError, match=r"world_size = 2: .* NeuronCores 1-2, which start at 1, expected a multiple"):
        group.start()
    assert set(reported) == {"placed"}
    group.shutdown()
    ray.kill(other)
