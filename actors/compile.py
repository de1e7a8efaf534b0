"""Compiles every graph of a configuration into its cache, without serving.

    python -m actors.compile CONFIG.yaml

Warms a gang up as a start does, and lists what was compiled beside the cache (`actors.compiled_graphs`). It needs the
devices that the configuration names; a gang of one on torch_xla's CPU device is what the tests compile.
`parallel.device: auto` counts as the CPU.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence

from actors.compiled_graphs import CompiledGraphs, graphs_digest
from actors.messages import WarmUp
from actors.plan import EnginePlan, make_plan
from configs.engine import ConfigError, EngineConfig, load_config

Run = Callable[[WarmUp], float]
"""Runs a bucket on every rank; returns rank 0's seconds."""


def compile_graphs(plan: EnginePlan, digest: str, run: Run) -> None:
    """Warm every bucket up, print each one's seconds, and list it. Raises ConfigError without compiler.cache_dir."""
    compiled = CompiledGraphs(plan, digest)
    names = plan.bucket_names()
    begin, before = time.monotonic(), compiled.files()
    for index, name in enumerate(names, start=1):
        seconds = run(WarmUp(step_id=-index, bucket=name))
        after = compiled.files()
        compiled.add(name, after - before)
        before = after
        print(f"{index} of {len(names)}: {name} in {seconds:.1f} s", flush=True)
    print(f"{len(names)} graphs in {time.monotonic() - begin:.1f} s, compiled into {compiled.folder}")


def _without_requirement(config: EngineConfig) -> EngineConfig:
    return config.model_copy(update={"compiler": config.compiler.model_copy(update={"require_compiled": False})})


def compile_alone(plan: EnginePlan) -> None:
    """A gang of one, in this process: on a NeuronCore unless PJRT_DEVICE says otherwise."""
    os.environ.setdefault("PJRT_DEVICE", "NEURON")
    from actors.model_runner import ModelRunner
    from actors.pixels import PixelMailbox
    from neuron.collectives import create_collectives
    from telemetry.recorder import Recorder

    timeout_s = plan.config.parallel.collective_timeout_s
    runner = ModelRunner(plan, create_collectives("gloo", 0, 1, "", timeout_s), PixelMailbox(), Recorder(()))
    compile_graphs(plan, graphs_digest(plan), lambda command: runner.warm_up(command).timings[command.bucket])


def compile_gang(plan: EnginePlan) -> None:
    """More ranks, as actors of the Ray cluster that is running or else of one on this machine."""
    import ray

    from actors.rank_group import RankGroup

    ray.init(ignore_reinit_error=True)
    group = RankGroup(plan, lambda stage, done, total, seconds: None)
    try:
        group.place_and_load()
        compile_graphs(plan, group.graphs_digest(), group.warm_up_bucket)
    finally:
        group.shutdown()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m actors.compile", description="Fill the compile cache.")
    parser.add_argument("config", help="a Serve config file")
    options = parser.parse_args(arguments)
    try:
        plan = make_plan(_without_requirement(load_config(options.config)))
        if not plan.kind.compiles:
            print(f"{options.config}: the {plan.device} device compiles nothing; set parallel.device: neuron")
        elif plan.config.parallel.world_size == 1:
            compile_alone(plan)
        else:
            compile_gang(plan)
    except ConfigError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
