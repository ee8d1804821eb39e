"""The graphs of gossip: which ranks a rank exchanges with. Pure functions, for any number of ranks P.

Every graph of `neighbors` is circulant: in one iteration all ranks send over the same distances, modulo P. So each rank
has as many sources as destinations, and equal weights 1 / (number of destinations + 1) are doubly stochastic.

- *ring*: the left and the right neighbour, as in Lian, Zhang, Zhang, Hsieh, Zhang, Liu, "Can decentralized algorithms
  outperform centralized algorithms?" (D-PSGD), NeurIPS 2017.
- *exponential*: the directed exponential graph of Assran, Loizou, Ballas, Rabbat, "Stochastic gradient push for
  distributed deep learning" (SGP), ICML 2019. With m `peers`, the distances are j (m+1)^i for j = 1 to m. An iteration
  uses those of one exponent i, and the iterations take the exponents in turn.

The graphs of `partners` are undirected and bipartite, for pairwise averages: Lian, Zhang, Zhang, Liu, "Asynchronous
decentralized parallel stochastic gradient descent" (AD-PSGD), ICML 2018. Even ranks are active and odd ranks are
passive. The distances are 1 for the ring, and 1 and 1 + 2^i for the exponential graph. All are odd, so an edge joins an
active and a passive rank. If P is odd, an edge across the end of the ranks would join two active ranks. It is left out,
and the ring becomes a path, which is connected still.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncoll.errors import UsageError

GRAPHS = ("ring", "exponential")


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph in one iteration. All ranks have an equal value; its text is compared between them."""

    name: str
    iteration: int = 0
    peers: int = 1  # destinations of a rank in an iteration; of the exponential graph only

    def distances(self, size: int) -> tuple[int, ...]:
        """The distinct distances, 1 to `size` - 1, from a rank to its destinations, ascending."""
        if size == 1:
            return ()
        if self.name == "ring":
            return tuple(sorted({1, size - 1}))
        peers = min(self.peers, size - 1)  # more would only repeat distances
        base = (peers + 1) ** (self.iteration % period(size, peers))
        return tuple(sorted({j * base % size for j in range(1, peers + 1)} - {0}))

    def destinations(self, size: int, rank: int) -> tuple[int, ...]:
        """The ranks that `rank` sends to, in the order of their distances."""
        return tuple((rank + distance) % size for distance in self.distances(size))

    def sources(self, size: int, rank: int) -> tuple[int, ...]:
        """The ranks that `rank` receives from, ascending."""
        return tuple(sorted((rank - distance) % size for distance in self.distances(size)))

    def __str__(self) -> str:
        peers = f", peers {self.peers}" if self.name == "exponential" else ""
        return f"{self.name} graph{peers}, iteration {self.iteration}"


def period(size: int, peers: int) -> int:
    """After how many iterations the exponential graph repeats: the number of powers of `peers` + 1 below `size`."""
    count, power = 0, 1
    while power < size:
        count, power = count + 1, power * (peers + 1)
    return count


def graph_of(name: str, iteration: int = 0, peers: int = 1) -> Graph:
    """The graph of these arguments. Raises UsageError if there is none."""
    if name not in GRAPHS:
        raise UsageError(f"unknown graph {name!r:.50}: use one of {', '.join(GRAPHS)}")
    if iteration < 0:
        raise UsageError(f"iterations count from 0, got {iteration}")
    if peers < 1:
        raise UsageError(f"a rank has at least 1 peer, got peers={peers}")
    if name == "ring" and peers != 1:
        raise UsageError(f"peers={peers} is for the exponential graph: a rank of the ring has its two neighbours")
    return Graph(name, iteration, peers)


def is_active(rank: int) -> bool:
    """Whether `rank` begins pairwise averages; the others answer."""
    return rank % 2 == 0


def partners(name: str, size: int, rank: int) -> tuple[int, ...]:
    """The ranks that `rank` averages with, ascending: passive ones if it is active, and active ones if it is not."""
    distances = {1}
    if name == "exponential":
        distances |= {1 + (1 << i) for i in range(1, size.bit_length()) if 1 + (1 << i) < size}
    ends = {rank + sign * distance for distance in distances for sign in (1, -1)}
    if size % 2 == 0:
        ends = {end % size for end in ends}
    return tuple(sorted(end for end in ends if 0 <= end < size))
