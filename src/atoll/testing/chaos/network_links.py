"""Links between network namespaces that the fault injector can cut or shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from atoll.core.errors import ConfigError
from atoll.testing.chaos.faults import LIGHTHOUSE, FaultScript
from atoll.testing.namespaces import NetworkNamespace, inside_namespace, star_network, unavailable_reason


class ShapedLink:
    """A link between network namespaces, its ends from `atoll.testing.namespaces`. A fault_injector.FaultyLink. `mbit_per_s` is its
    normal rate; None: unshaped."""

    def __init__(self, ends: Sequence[NetworkNamespace], mbit_per_s: float | None = None) -> None:
        self._ends, self._rate = tuple(ends), mbit_per_s
        self.restore()

    def cut(self) -> None:
        for end in self._ends:
            end.drop_packets()

    def shape(self, mbit_per_s: float) -> None:
        for end in self._ends:
            end.shape(mbit_per_s)

    def restore(self) -> None:
        for end in self._ends:
            end.shape(self._rate)


class NamespaceNetwork:
    """A star of network namespaces, one per process of a run. A process whose link is cut reaches no other."""

    def __init__(self, ends: Mapping[str, tuple[NetworkNamespace, NetworkNamespace]]) -> None:
        self._ends = ends
        self.links = {name: ShapedLink(pair) for name, pair in ends.items()}
        self.address = ends[LIGHTHOUSE][0].address  # of the lighthouse

    def inside(self, name: str, command: Sequence[str]) -> list[str]:
        """The command that starts a process in the namespace of this name."""
        return self._ends[name][0].inside(command)


@contextmanager
def namespace_network(islands: Sequence[str]) -> Iterator[NamespaceNetwork]:
    """Creates a namespace for the lighthouse and for each island. Meanwhile the calling thread is in the lighthouse's namespace."""
    with star_network([LIGHTHOUSE, *islands]) as ends, inside_namespace(ends[LIGHTHOUSE][0]):
        yield NamespaceNetwork(ends)


def check_links(script: FaultScript, names: Sequence[str]) -> None:
    """Refuses link faults of unknown links, and all link faults where network namespaces cannot be created."""
    if not script.links:
        return
    unknown = sorted(script.links - set(names))
    if unknown:
        raise ConfigError(
            f"a fault script names the links of {', '.join(unknown)}; the run has those of {', '.join(names)}. Name one of these."
        )
    reason = unavailable_reason()
    if reason is not None:
        raise ConfigError(
            f"a fault script has link faults, which need network namespaces, and {reason}. Leave out Cut and Slow, or run it "
            f"where namespaces can be created."
        )
