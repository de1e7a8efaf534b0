"""What the ranks of a gang exchange: one small interface and its implementations.

`create_collectives(kind, ...)` joins the gang. Kinds: `shared_memory` (ranks on one CPU host), `gloo` (CPU ranks on any
hosts), `xla` (ranks on NeuronCores; it has not run on hardware), and what `register_collectives` adds.
"""

from collections.abc import Callable

from neuron.collectives.interface import CollectiveError, Collectives
from neuron.collectives.shared_memory import SharedMemoryCollectives
from neuron.collectives.torch_distributed import TorchDistributedCollectives
from neuron.collectives.xla import XlaCollectives

__all__ = [
    "CollectiveError",
    "CollectiveFactory",
    "Collectives",
    "SharedMemoryCollectives",
    "TorchDistributedCollectives",
    "XlaCollectives",
    "create_collectives",
    "register_collectives",
]

CollectiveFactory = Callable[[int, int, str, float], Collectives]
"""(rank, world_size, rendezvous, timeout_s) -> the joined collectives."""

_FACTORIES: dict[str, CollectiveFactory] = {
    "shared_memory": SharedMemoryCollectives,
    "gloo": TorchDistributedCollectives,
    "xla": XlaCollectives,
}


def register_collectives(kind: str, factory: CollectiveFactory) -> None:
    """Make `create_collectives(kind, ...)` call `factory`; a kind of the same name is replaced."""
    _FACTORIES[kind] = factory


def create_collectives(kind: str, rank: int, world_size: int, rendezvous: str, timeout_s: float) -> Collectives:
    """Join the gang as `rank` and return once every rank has joined.

    rendezvous: a token that no other living gang uses (`shared_memory`: letters, digits, `.`, `_`, `-`), or the
        init_method of torch.distributed (`gloo`, `xla`: `tcp://host:port`, `file:///path`).
    timeout_s: bounds joining and every later collective, in seconds.
    Raises CollectiveError when ranks are missing, ValueError for an argument that cannot be right, ConfigError when
    what `xla` needs is not installed.
    """
    factory = _FACTORIES.get(kind)
    if factory is None:
        raise ValueError(f"collectives kind {kind!r}: expected one of {', '.join(sorted(_FACTORIES))}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank}: expected 0 <= rank < world_size ({world_size})")
    if timeout_s <= 0:
        raise ValueError(f"timeout_s {timeout_s}: expected a number of seconds above 0")
    return factory(rank, world_size, rendezvous, timeout_s)
