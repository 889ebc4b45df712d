"""Compare the planner with AMSP's own choices (Chen et al., arXiv:2311.00257, table IV), and find what makes those optimal.

    python -m scripts.report.plan_paper            # plan-paper.json, .md, .png and plan-MODEL.png in out
    python -m scripts.report.plan_paper --write    # the same in docs/results, whose files are tracked
    python -m scripts.report.plan_paper --fit      # only fit the four unknown figures of training/planner/clusters/a800.json to table V

The paper states the batch, the GPUs and their links, but not the activations, the buffers and the measured bandwidths. The plan
is chosen from equations and stated figures. Then the unknown figures are varied, to find for which values the paper's row is
optimal. Section VI.A.4 uses one configuration from 8 to 1,024 GPUs (for the 30B from 32). So a plan is judged in two ways: on
1,024 GPUs alone, and by its mean over all these sizes. In the second case its meshes must tile the smallest size.
"""

import argparse
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from tqdm import tqdm

from cli import Parser, run
from config import ModelConfig, preset
from scripts.lib.results import add_write_option, made, results_folder, write_json, write_text
from training.plan import as_json, draw, parse_args, scaling
from training.planner.cluster import Cluster, load_cluster
from training.planner.collectives import Point, Profile, link_seconds, synthesize
from training.planner.cost import Communication, Prediction, forward_flops, predict
from training.planner.memory import activations
from training.planner.search import choose, filtered_meshes, rank, shardings, tiling_meshes
from training.planner.workload import OVERLAPS, Workload
from training.sharding import Mesh, Sharding

GB = 1e9
# Table IV, and the utilization (%) that section VI.B states for 1,024 GPUs. "51 and 52": the text states different values in two places.
TABLE_IV = {"llama-7b": "1,1,8x1", "llama-13b": "4x1,4x1,8x1", "llama-30b": "8x1,8x1,8x4"}
STATED_MFU = {"llama-7b": "51", "llama-13b": "51 and 52", "llama-30b": "42 and 43"}
# Table V: tokens per GPU and second on 64 GPUs with 1, 2, 4 and 8 micro-batches, and the MFU that it states for 8. The four rows
# of a model: everything overlapped; all but the updates; all but the updates and all-reduces; nothing.
MICRO_BATCHES = (1, 2, 4, 8)
OVERLAP_ROWS = [frozenset(OVERLAPS), frozenset(OVERLAPS[:2]), frozenset(OVERLAPS[:1]), frozenset[str]()]
TABLE_V = {
    "llama-7b": [(3525, 4119, 4416, 4503), (3346, 3991, 4329, 4438), (2812, 3609, 4070, 4286), (2812, 3609, 4070, 4286)],
    "llama-13b": [(1918, 2082, 2183, 2230), (1895, 1920, 2160, 2184), (1630, 1782, 2033, 2126), (1527, 1552, 1608, 1666)],
    "llama-30b": [(825, 856, 872, 880), (759, 814, 847, 859), (651, 740, 814, 842), (557, 654, 678, 719)],
}
TABLE_V_MFU = {"llama-7b": 0.67, "llama-13b": 0.62, "llama-30b": 0.51}
# The throughput and MFU of table V's 30B imply 1.81e11 FLOPs a token. Llama 1's 30B has 2.14e11; this shape has 1.82e11.
NARROW_30B = replace(preset("llama-30b"), hidden_size=6144, n_heads=48, n_kv_heads=48, intermediate_size=16384)
FITTED = ("compute_efficiency", "link_efficiency", "node_efficiency", "overlap_share")

# The figures that are varied, in all combinations
LINK_EFFICIENCIES = (0.4, 0.5, 0.6, 0.7, 0.9, 1.0)  # in addition to that in a800.json
PART_OF_NODE = (1.0, 0.9, 0.85, 0.8, 0.7, 0.5)  # bandwidth of groups of 2 or 4 GPUs of a node relative to that of all 8
NETWORKS = ((0, 1.0), (4, 0.75), (4, 0.5))  # nodes under a leaf switch, share of bandwidth through the spine
MOST_MEMORY = 80 * GB

SMALLEST = {"llama-7b": 1, "llama-13b": 1, "llama-30b": 4}  # fewest nodes on which section VI.B trains each model
MOST_NODES = 128
RULES = {  # how a plan is judged: whether over all sizes of the cluster, and the objective
    "1,024 GPUs": (False, "communication"),
    "all sizes": (True, "communication"),
    "all sizes, step": (True, "step"),
}
Interval = tuple[float, float]


# --- fitting the unknown figures to table V ------------------------------------------------------------------------------


class Links(Profile):
    """A profile that computes times from a cluster's figures instead of a table. The fit tries many clusters."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(f"links of {cluster.name}", cluster.gpus_per_node, [])
        self.cluster = cluster

    def seconds(self, operation: str, size: float, mesh: Mesh) -> float:
        return 0.0 if mesh.size == 1 else link_seconds(self.cluster, operation, size, mesh)


def table_v(cluster: Cluster, models: Mapping[str, ModelConfig]) -> Iterator[tuple[float, int]]:
    """Predicted and stated throughput (tokens per GPU and second) of each cell of table V."""
    profile, mesh = Links(cluster), Mesh(8, 8)
    for name, config in models.items():
        whole = Workload(config, mesh, cluster, profile, recompute=name == "llama-30b")
        for overlap, stated in zip(OVERLAP_ROWS, TABLE_V[name], strict=True):
            for count, tokens in zip(MICRO_BATCHES, stated, strict=True):
                workload = replace(whole, overlap=overlap, global_batch=mesh.size * whole.tokens * count)
                yield predict(workload, Sharding.parse(TABLE_IV[name])).tokens_per_gpu_second, tokens


def misfit(cluster: Cluster, models: Mapping[str, ModelConfig]) -> float:
    """Root mean square of the relative errors of the predictions for table V."""
    errors = [(got / stated - 1) ** 2 for got, stated in table_v(cluster, models)]
    return (sum(errors) / len(errors)) ** 0.5


def fit(cluster: Cluster, models: Mapping[str, ModelConfig]) -> tuple[Cluster, float]:
    """Fit the FITTED figures to table V by coordinate descent. Returns the cluster and its `misfit`.

    All figures start at 0.5. The best change of a single figure is made as long as it helps; then the step is halved.
    """
    middle: dict[str, Any] = dict.fromkeys(FITTED, 0.5)
    cluster = replace(cluster, **middle)
    best, step = misfit(cluster, models), 0.1
    while step > 0.002:
        moves = [
            replace(cluster, **{name: min(1.0, max(0.01, getattr(cluster, name) + sign * step))})
            for name, sign in itertools.product(FITTED, (-1, 1))
        ]
        error, nearest = min(((misfit(move, models), move) for move in moves), key=lambda pair: pair[0])
        if error < best - 1e-7:
            best, cluster = error, nearest
        else:
            step /= 2
    return cluster, best


def report_fit(cluster: Cluster) -> dict[str, Any]:
    """Fits to table V for different sets of models and shapes of the 30B."""
    small = {name: preset(name) for name in ("llama-7b", "llama-13b")}
    cases = {
        "7B, 13B and a 30B of 6144 features": small | {"llama-30b": NARROW_30B},
        "7B, 13B and Llama 1's 30B of 6656 features": small | {"llama-30b": preset("llama-30b")},
        "7B and 13B": small,
        "7B": {"llama-7b": preset("llama-7b")},
    }
    found = {}
    for name, models in tqdm(cases.items(), unit="fit", disable=None):
        fitted, error = fit(cluster, models)
        found[name] = {figure: round(getattr(fitted, figure), 3) for figure in FITTED} | {"rms_error": round(error, 4)}
    return found


# --- when the paper's rows are optimal -------------------------------------------------------------------------------------


def paper_workload(name: str, cluster: Cluster, part: float = 1.0, config: ModelConfig | None = None) -> Workload:
    """The workload of section VI.A: 1,024 GPUs, 4M tokens, sequences of 4,096, micro-batches of one, updates not overlapped.

    part: bandwidth of groups of 2 or 4 GPUs of a node relative to that of all 8.
    """
    profile = synthesize(cluster, MOST_NODES)
    if part != 1.0:
        slower = [
            Point(p.operation, p.mesh, p.bytes, p.seconds / part) if p.mesh.nodes == 1 and p.mesh.gpus < 8 else p
            for p in profile.points
        ]
        profile = Profile(profile.name, profile.gpus_per_node, slower)
    model = config or preset(name)
    overlap = frozenset(OVERLAPS) - {"updates"}
    return Workload(model, Mesh(8, MOST_NODES), cluster, profile, recompute=name == "llama-30b", overlap=overlap)


def candidates(name: str, workload: Workload, over_sizes: bool) -> list[Prediction]:
    """All plans for the workload. With `over_sizes`: those that tile the smallest cluster, with mean times over all sizes."""
    if not over_sizes:
        return [predict(workload, sharding) for sharding in shardings(filtered_meshes(workload.mesh))]
    nodes = [n for n in (2**i for i in range(8)) if SMALLEST[name] <= n <= MOST_NODES]
    jobs = [replace(workload, mesh=Mesh(8, n)) for n in nodes]
    return [mean([predict(each, sharding) for each in jobs]) for sharding in shardings(filtered_meshes(jobs[0].mesh))]


def mean(plans: list[Prediction]) -> Prediction:
    """The last plan, with the means of all plans' communication and step times."""
    spent = [asdict(plan.communication) for plan in plans]
    average = Communication(**{kind: sum(each[kind] for each in spent) / len(spent) for kind in spent[0]})
    return replace(plans[-1], communication=average, step_seconds=sum(plan.step_seconds for plan in plans) / len(plans))


def choices(plans: list[Prediction], objective: str) -> list[tuple[Interval, Sharding]]:
    """The chosen shardings by the memory that activations and reserve need: intervals (from, to) in bytes, increasing.

    More of this memory leaves less for model states and buffers, so that fewer plans fit into MOST_MEMORY.
    """
    room = [MOST_MEMORY - (plan.memory.total - plan.memory.activations - plan.memory.reserve) for plan in plans]
    found: list[tuple[Interval, Sharding]] = []
    edges = sorted({0.0, *(left for left in room if left > 0)})
    for low, high in itertools.pairwise(edges):
        fitting = [plan for plan, left in zip(plans, room, strict=True) if left >= high]
        best = rank(fitting, objective)[0].sharding
        if found and found[-1][1] == best:
            found[-1] = ((found[-1][0][0], high), best)
        else:
            found.append(((low, high), best))
    return found


def judge(name: str, workload: Workload, rule: str) -> list[tuple[Interval, Sharding]]:
    """`choices` by one of RULES."""
    over_sizes, objective = RULES[rule]
    return choices(candidates(name, workload, over_sizes), objective)


def intervals_of(row: str, judged: list[tuple[Interval, Sharding]]) -> list[Interval]:
    """The intervals of memory for activations and reserve, in GB, in which `row` is chosen."""
    return [(round(a / GB, 1), round(b / GB, 1)) for (a, b), sharding in judged if sharding == Sharding.parse(row)]


def settings(cluster: Cluster) -> list[tuple[float, float, tuple[int, float]]]:
    """All combinations of link efficiency, relative bandwidth of a part of a node, and network."""
    return list(itertools.product((cluster.link_efficiency, *LINK_EFFICIENCIES), PART_OF_NODE, NETWORKS))


def vary(cluster: Cluster) -> list[dict[str, Any]]:
    """Each combination of the varied figures for which a row of table IV is optimal with some amount of memory."""
    found = []
    for link, part, (leaf, spine) in tqdm(settings(cluster), unit="setting", disable=None):
        changed = replace(cluster, link_efficiency=link, nodes_per_leaf=leaf, spine_share=spine)
        setting = {"link_efficiency": link, "part_of_node": part, "nodes_per_leaf": leaf, "spine_share": spine}
        for name, row in TABLE_IV.items():
            workload = paper_workload(name, changed, part)
            for rule in RULES:
                if intervals := intervals_of(row, judge(name, workload, rule)):
                    found.append({"model": name, "rule": rule, **setting, "gb_beside_states": intervals})
    return found


def flops_of_table_v(cluster: Cluster) -> dict[str, Any]:
    """FLOPs per token that the throughput and MFU of table V imply, and those of the models' shapes."""
    rows = {}
    for name, mfu in TABLE_V_MFU.items():
        shapes = {"Llama 1": preset(name)} | ({"6144 features": NARROW_30B} if name == "llama-30b" else {})
        rows[name] = {"table V": mfu * cluster.peak_flops("bfloat16") / TABLE_V[name][0][-1]}
        rows[name] |= {shape: 3 * forward_flops(config, 4096, 1) / 4096 for shape, config in shapes.items()}
    return rows


# --- the report ------------------------------------------------------------------------------------------------------------


def zero3_memory(cluster: Cluster) -> list[dict[str, float]]:
    """Memory of the 30B under ZeRO-3 in GB: as section VI.B.2 states, the same without model states, and as computed here."""
    rows = []
    for gpus, stated in ((512, 16), (1024, 15)):
        workload = replace(paper_workload("llama-30b", cluster), mesh=Mesh(8, gpus // 8))
        plan = predict(workload, Sharding(workload.mesh, workload.mesh, workload.mesh))
        states = 16 * workload.parameters / gpus / GB
        rows.append({"gpus": gpus, "stated": stated, "stated_beside_states": stated - states, "here": plan.memory.total / GB})
    return rows


def compare(cluster: Cluster) -> dict[str, Any]:
    """By model: the choice by each rule, the paper's row, and the memory for which that row would be chosen."""
    rows = {}
    for name, text in TABLE_IV.items():
        workload = paper_workload(name, cluster)
        own, best = predict(workload, Sharding.parse(text)), choose(workload, MOST_MEMORY, "communication")[0]
        beside = activations(workload) + workload.reserve_bytes
        judged = {rule: judge(name, workload, rule) for rule in RULES}
        rows[name] = {
            "table_iv": str(own.sharding),
            "chosen": {rule: next(str(s) for (a, b), s in judged[rule] if a <= beside < b) for rule in RULES},
            "chosen_on_1024": as_json(best),
            "of_table_iv": as_json(own),
            "stated_mfu_percent": STATED_MFU[name],
            "gb_beside_states_here": round(beside / GB, 1),
            "gb_beside_states_for_table_iv": {rule: intervals_of(text, judged[rule]) for rule in RULES},
            "communication_above_the_choice": own.communication.total / best.communication.total - 1,
        }
    return rows


def gb(intervals: list[Interval]) -> str:
    return ", ".join(f"{a:g} to {b:g}" for a, b in intervals) or "never"


def nearest_settings(found: list[dict[str, Any]], link_efficiency: float) -> list[str]:
    """Markdown lines: for each model and rule, the settings of `vary` that change the fewest figures.

    If a row is chosen without any change, the settings that change one figure are listed too.
    """
    shipped = {"link_efficiency": link_efficiency, "part_of_node": 1.0, "nodes_per_leaf": 0}
    lines = []
    for name, rule in itertools.product(TABLE_IV, RULES):
        mine = [(f, [k for k in shipped if f[k] != shipped[k]]) for f in found if (f["model"], f["rule"]) == (name, rule)]
        fewest = max(1, min((len(changed) for _, changed in mine), default=1))
        if not mine:
            lines.append(f"| {name} | {rule} | none of the settings | never |")
        by_memory: dict[str, list[str]] = {}
        for setting, changed in mine:
            if len(changed) <= fewest:
                text = " and ".join(_changed(setting, key) for key in changed) or "as shipped"
                by_memory.setdefault(gb(setting["gb_beside_states"]), []).append(text)
        lines += [f"| {name} | {rule} | {'; '.join(texts)} | {memory} |" for memory, texts in by_memory.items()]
    return lines


def _changed(setting: dict[str, Any], key: str) -> str:
    if key == "nodes_per_leaf":
        return f"{setting[key]} nodes a leaf, spine {setting['spine_share']:g}"
    return f"{key.replace('_', ' ')} {setting[key]:g}"


def joint(found: list[dict[str, Any]]) -> dict[str, int]:
    """The number of bandwidth settings in which each set of rows is optimal at the same time. The rows' memory may differ."""
    counts: dict[str, int] = {}
    keys = ("rule", "link_efficiency", "part_of_node", "nodes_per_leaf", "spine_share")
    for setting in sorted({tuple(f[k] for k in keys) for f in found}):
        models = sorted({f["model"] for f in found if tuple(f[k] for k in keys) == setting})
        name = f"{setting[0]}: {' and '.join(models)}"
        counts[name] = counts.get(name, 0) + 1
    return counts


def markdown(result: dict[str, Any]) -> str:
    rows, bar = result["rows"], "|---" * (len(RULES) + 2) + "|"
    rules = " | ".join(RULES)
    lines = [f"| model | table IV | {' | '.join(f'chosen, {rule}' for rule in RULES)} |", bar]
    lines += [f"| {name} | {row['table_iv']} | {' | '.join(row['chosen'].values())} |" for name, row in rows.items()]
    plans = result["plans"]
    lines += [
        "",
        f"Plans for 1,024 GPUs: {plans['first_filter']} behind the first filter, {plans['both_filters']} behind both.",
    ]
    lines += ["", "Table IV's row on 1,024 GPUs:", ""]
    lines += ["| model | communication above the chosen plan's | predicted MFU, % | stated MFU, % |", "|---|---|---|---|"]
    for name, row in rows.items():
        more, mfu = row["communication_above_the_choice"], 100 * row["of_table_iv"]["mfu"]
        lines.append(f"| {name} | {more:.1%} | {mfu:.1f} | {row['stated_mfu_percent']} |")
    lines += [
        "",
        "GB of a GPU beside model states and the executor's buffers (activations and reserve) for which the row is chosen:",
        "",
    ]
    lines += [f"| model | computed here | {rules} |", bar]
    for name, row in rows.items():
        ranges = " | ".join(gb(intervals) for intervals in row["gb_beside_states_for_table_iv"].values())
        lines.append(f"| {name} | {row['gb_beside_states_here']} | {ranges} |")
    lines += ["", "ZeRO-3's memory for the 30B, GB a GPU (section VI.B.2):", ""]
    lines += ["| GPUs | stated | of it beside model states | computed here |", "|---|---|---|---|"]
    for row in result["zero3_30b_gb"]:
        lines.append(f"| {row['gpus']} | {row['stated']} | {row['stated_beside_states']:.1f} | {row['here']:.1f} |")
    lines += ["", "GB beside states for which the row is chosen with other bandwidths, changing the fewest figures:", ""]
    lines += [
        "| model | judged by | changed figures | GB beside states |",
        "|---|---|---|---|",
        *nearest_settings(result["varied"], result["link_efficiency"]),
    ]
    lines += ["", f"Rows that are the optimum at once, of {result['settings_tried']} settings of the bandwidths:", ""]
    lines += ["| judged by: rows | settings |", "|---|---|", *(f"| {name} | {n} |" for name, n in result["joint"].items())]
    lines += ["", "Fit of the open figures to the throughputs of table V (16 a model):", ""]
    lines += ["| models | " + " | ".join(f.replace("_", " ") for f in FITTED) + " | RMS error |", "|---|---|---|---|---|---|"]
    for name, figures in result["fit"].items():
        lines.append(f"| {name} | " + " | ".join(f"{figures[f]:.3f}" for f in FITTED) + f" | {figures['rms_error']:.1%} |")
    lines += [
        "",
        "FLOPs a token, forward and backward, in 1e11:",
        "",
        "| model | from table V | Llama 1's shape | 6144 features |",
    ]
    lines.append("|---|---|---|---|")
    for name, flops in result["flops_per_token"].items():
        cells = [f"{flops[key] / 1e11:.3f}" if key in flops else "" for key in ("table V", "Llama 1", "6144 features")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    caption = "1,024 A800s (all sizes: 8 to 1,024, 30B from 32), 4M tokens a step, sequences of 4,096, micro-batches of one, 80 GB a GPU"
    return "\n".join([*lines, "", f"{caption}; bandwidths synthesized from training/planner/clusters/a800.json.", ""])


def draw_choices(cluster: Cluster, path: Path) -> None:
    """Plot the chosen plan by the memory for activations and reserve. Table IV's row is orange, the computed memory dashed."""
    figure, axes = plt.subplots(3, 2, figsize=(13, 6), sharex=True, layout="constrained")
    for line, name in zip(axes, TABLE_IV, strict=True):
        workload, row = paper_workload(name, cluster), Sharding.parse(TABLE_IV[name])
        for axis, rule in zip(line, ("1,024 GPUs", "all sizes"), strict=True):
            for i, ((a, b), sharding) in enumerate(judge(name, workload, rule)):
                color = "#dd8452" if sharding == row else ("#4c72b0", "#8da9cf")[i % 2]
                axis.broken_barh([(a / GB, (b - a) / GB)], (0, 1), color=color)
                if b - a > 5.5 * GB:
                    text = str(sharding).replace(", ", "\n")
                    axis.text((a + b) / 2 / GB, 0.5, text, ha="center", va="center", fontsize=7, color="white")
            axis.axvline((activations(workload) + workload.reserve_bytes) / GB, color="black", linestyle="--", linewidth=1)
            axis.set_yticks([])
            axis.set_title(f"{name}, judged by {rule}", loc="left", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("GB beside model states and buffers (dashed: computed; orange: table IV's row)")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def count_plans(cluster: Cluster) -> dict[str, int]:
    """Number of nested plans for 1,024 GPUs after the first filter, and after both filters. The latter are tried."""
    mesh = paper_workload("llama-7b", cluster).mesh
    return {"first_filter": len(shardings(tiling_meshes(mesh))), "both_filters": len(shardings(filtered_meshes(mesh)))}


def predicted_mfu(name: str, cluster: Cluster) -> dict[str, list[tuple[int, float]]]:
    """(GPUs, MFU) by scheme. The chosen plan is that with the least communication."""
    flags = ["--model", name, "--gpus", "1024", "--cluster", "a800", "--no-overlap", "updates", "--objective", "communication"]
    flags += ["--recompute"] if name == "llama-30b" else []
    return scaling(paper_workload(name, cluster), parse_args(flags), MOST_MEMORY)


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="only fit the unknown figures of the A800 cluster to table V")
    add_write_option(parser)
    args = parser.parse_args()
    folder = results_folder(args)
    cluster = load_cluster("a800")
    fitted = report_fit(cluster)
    if args.fit:
        for name, figures in fitted.items():
            print(f"{name}: {figures}")
        return
    varied = vary(cluster)
    result: dict[str, Any] = {
        "settings": {"gpus": 1024, "global_batch": 2**22, "sequence_length": 4096, "micro_batch": 1, "gpu_memory_gb": 80},
        "link_efficiency": cluster.link_efficiency,
        "plans": count_plans(cluster),
        "rows": compare(cluster),
        "zero3_30b_gb": zero3_memory(cluster),
        "fit": fitted,
        "flops_per_token": flops_of_table_v(cluster),
        "settings_tried": len(settings(cluster)),
        "joint": joint(varied),
        "varied": varied,
        "mfu": {name: predicted_mfu(name, cluster) for name in TABLE_IV},
    }
    path, text = write_json("plan-paper", result, folder), markdown(result)
    write_text(path.with_suffix(".md"), text, path)
    plots = {name: folder / f"plan-{name}.png" for name in TABLE_IV}
    draw_choices(cluster, path.with_suffix(".png"))
    for name, plot in plots.items():
        draw(result["mfu"][name], f"{name}, {cluster.name}, 4M tokens a step or one micro-batch a GPU", plot)
    for drawn in (path.with_suffix(".png"), *plots.values()):
        made(drawn, path)
    print(f"{text}\nwrote plan-paper.json, .md and .png, and plan-MODEL.png, in {folder}")


if __name__ == "__main__":
    run(main)
