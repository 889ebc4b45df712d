"""How the model states are sharded: one device mesh each for parameters (P), gradients (G) and optimizer states (OS).

The notation is that of AMSP (Chen et al., arXiv:2311.00257). A mesh `a x b` spans a GPUs on each of b nodes. A state that
is sharded over it is cut into a * b parts, and copied to all other meshes of that shape, which tile the cluster. 1 x 1 is
Full-Replica, all GPUs of all nodes is Full-Sharding, and anything in between is Partial-Sharding.
"""

from dataclasses import dataclass
from itertools import pairwise

from errors import UserError

# The communication that can overlap with computation: all-gather and reduce-scatter of P during forward and backward; the buckets'
# all-reduce during backward; the transfer of new parameters during the next forward. Each can be switched off to measure what it
# gains (AMSP, table V).
OVERLAPS = ("parameters", "gradients", "updates")


@dataclass(frozen=True, order=True)
class Mesh:
    """`gpus` GPUs on each of `nodes` nodes."""

    gpus: int = 1
    nodes: int = 1

    @property
    def size(self) -> int:
        return self.gpus * self.nodes

    def inside(self, other: "Mesh") -> bool:
        """Whether meshes of this shape tile a mesh of the shape of `other`."""
        return other.gpus % self.gpus == 0 and other.nodes % self.nodes == 0

    def __str__(self) -> str:
        return f"{self.gpus}x{self.nodes}"

    @staticmethod
    def parse(text: str) -> "Mesh":
        """`8x4` (GPUs per node x nodes) or `8` (on one node). Raises UserError."""
        gpus, _, nodes = text.strip().lower().replace("×", "x").partition("x")
        try:
            mesh = Mesh(int(gpus), int(nodes or 1))
        except ValueError:
            mesh = Mesh(0, 0)
        if mesh.gpus < 1 or mesh.nodes < 1:
            raise UserError(
                f"{text!r} is not a mesh; write GPUs per node x nodes, such as 8x4, or 8 for eight GPUs of one node"
            )
        return mesh


@dataclass(frozen=True)
class Sharding:
    """The meshes of the three states, each inside the next (AMSP, section IV.B, the dependency rule)."""

    parameters: Mesh
    gradients: Mesh
    optimizer: Mesh

    def __str__(self) -> str:
        return f"P {self.parameters}, G {self.gradients}, OS {self.optimizer}"

    def check(self, cluster: Mesh) -> None:
        """Raise UserError unless the meshes nest and tile the cluster."""
        chain = [("P", self.parameters), ("G", self.gradients), ("OS", self.optimizer), ("the cluster", cluster)]
        for (inner_name, inner), (outer_name, outer) in pairwise(chain):
            if not inner.inside(outer):
                raise UserError(
                    f"the mesh of {inner_name} ({inner}) does not divide that of {outer_name} ({outer}): P must lie inside G, "
                    "G inside OS, and OS must tile the cluster, both in GPUs per node and in nodes"
                )

    @staticmethod
    def parse(text: str) -> "Sharding":
        """Three meshes, `P,G,OS`: `1,1,8` or `8,8,8x4`. Raises UserError."""
        meshes = text.split(",")
        if len(meshes) != 3:
            raise UserError(f"{text!r} is not a sharding; give the meshes of P, G and OS, such as 1,1,8x1 or 8,8,8x4")
        return Sharding(*(Mesh.parse(m) for m in meshes))
