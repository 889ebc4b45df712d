"""What low-rank adapters add to the linear layers of a Llama-8B block on one GPU: µs of the adapters' kernels, in CUDA graphs.

    python -m scripts.bench.kernels.lora --rank 16 --adapters 1 4

Each number is the median of replays of a chain of layers with weights of their own, larger than the L2 cache, divided by their number.
The column `none` has slots but no row with an adapter, as in a batch of the base alone.
"""

from statistics import median

import numpy as np
import torch
from torch import Tensor

from cli import Parser, run
from errors import UserError
from kernels.graph_times import replay_seconds
from kernels.lora import DECODE_TILE, PREFILL_TILE, Groups, LowRank, add_low_rank, group_rows, most_tiles, padded_rank

LAYERS = {"qkv": (4096, (4096, 1024, 1024)), "o": (4096, (4096,)), "gate_up": (4096, (14336, 14336)), "down": (14336, (4096,))}
ROWS = (1, 4, 16, 64, 2048)
POOL_BYTES = 256 << 20  # of A and B in a chain, five times the L2 cache
REPLAYS = 20


def groups(rows: int, slots: int, used: int) -> Groups:
    """Rows that take turns with `used` adapters; 0: none has one."""
    tile = DECODE_TILE if rows <= 64 else PREFILL_TILE
    order, tiles = torch.zeros(rows, dtype=torch.int32), torch.zeros(most_tiles(rows, slots, tile), 3, dtype=torch.int32)
    chosen = np.arange(rows) * used // rows if used else np.full(rows, -1)
    for whole, part in zip((order, tiles), group_rows(chosen, tile), strict=True):
        whole[: len(part)] = torch.from_numpy(part)
    return Groups(order.cuda(), tiles.cuda(), tile)


@torch.inference_mode()
def microseconds(rows: int, name: str, slots: int, rank: int, used: int) -> float:
    size, sizes = LAYERS[name]
    rank, of_step = padded_rank(rank), groups(rows, slots, used)

    def weights() -> LowRank:
        a = torch.randn(slots, len(sizes), rank, size, device="cuda", dtype=torch.bfloat16)
        return LowRank(a, torch.randn(slots, sum(sizes), rank, device="cuda", dtype=torch.bfloat16), sizes)

    first = weights()
    layers = [first, *(weights() for _ in range(POOL_BYTES // (first.a.nbytes + first.b.nbytes)))]
    x, y = (torch.randn(rows, n, device="cuda", dtype=torch.bfloat16) for n in (size, sum(sizes)))

    def chain() -> Tensor:
        for layer in layers:
            add_low_rank(y, x, layer, of_step)
        return y

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    return 1e6 * median(replay_seconds(graph, REPLAYS)) / len(layers)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--rank", type=int, default=16, help="default: 16")
    parser.add_argument("--slots", type=int, default=4, help="default: 4")
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 4], help="in a batch, at most --slots (default: 1 4)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise UserError("this measures GPU kernels; start it on a machine with a GPU")
    print(f"{'layer':8} {'rows':>5} {'none':>8}" + "".join(f"{f'{n} used':>9}" for n in args.adapters))
    for name in LAYERS:
        for rows in ROWS:
            times = [microseconds(rows, name, args.slots, args.rank, min(n, rows)) for n in (0, *args.adapters)]
            print(f"{name:8} {rows:5} {times[0]:8.2f}" + "".join(f"{t:9.2f}" for t in times[1:]), flush=True)


if __name__ == "__main__":
    run(main)
