"""The wiring: two deployments from one typed configuration. `serve run` imports `deployments.app:build`."""

from ray import serve
from ray.serve import Application

from actors.environment import KEEPS_BUFFERS
from actors.plan import make_plan
from configs.engine import EngineConfig
from deployments.renderer.deployment import RendererDeployment
from deployments.scheduler.deployment import SchedulerDeployment
from telemetry import probe, prometheus, spans

_REPLICA_CPUS = 0.1
"""Ray CPUs that each replica's process reserves."""

_IDLE_LOOK_S = 0.5
"""How often a replica that ends looks whether its last requests are done; Serve's two seconds add up at every stop."""


def build(args: EngineConfig) -> Application:
    """Renderer -> Scheduler -> its gang. Options of either deployment can be overridden by name in the Serve config."""
    import ray

    neuron_cores = int(ray.cluster_resources().get("neuron_cores", 0)) if ray.is_initialized() else 0
    plan = make_plan(args, neuron_cores)
    prometheus.wipe_stale(args.telemetry.multiproc_dir)
    variables = prometheus.environment(args.telemetry.multiproc_dir) | probe.environment() | spans.environment()
    actor_options = {"num_cpus": _REPLICA_CPUS, "runtime_env": {"env_vars": variables | KEEPS_BUFFERS}}
    scheduler = serve.deployment(
        name="Scheduler",
        ray_actor_options=actor_options,
        placement_group_bundles=[{"CPU": _REPLICA_CPUS}] + [plan.rank_bundle] * args.parallel.world_size,
        placement_group_strategy="STRICT_PACK",
        max_ongoing_requests=4096,
        health_check_period_s=5,
        health_check_timeout_s=60,
        graceful_shutdown_timeout_s=args.server.shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=_IDLE_LOOK_S,
    )(SchedulerDeployment)
    renderer = serve.deployment(
        name="Renderer",
        ray_actor_options=actor_options,
        max_ongoing_requests=4096,
        graceful_shutdown_timeout_s=args.server.shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=_IDLE_LOOK_S,
    )(serve.ingress()(RendererDeployment))
    return renderer.bind(args, scheduler.bind(args))
