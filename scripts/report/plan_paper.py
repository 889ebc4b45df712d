"""Compare the planner with AMSP's own choices (Chen et al., arXiv:2311.00257, table IV), and find what makes those optimal.

    python -m scripts.report.plan_paper            # plan-paper.json and .md in out
    python -m scripts.report.plan_paper --write    # the same in docs/results, whose files are tracked
    python -m scripts.report.plan_paper --fit      # only fit the four unknown figures of clusters/a800.json to table V

The paper states the batch, the GPUs and their links, but not the activations, the buffers and the measured bandwidths. The plan
is chosen from equations and stated figures. Then the unknown figures are varied, to find for which values the paper's row is
optimal. Section VI.A.4 uses one configuration from 8 to 1,024 GPUs (for the 30B from 32). So a plan is judged in two ways: on
1,024 GPUs alone, and by its mean over all these sizes. In the second case its meshes must tile the smallest size.
"""

import itertools
from dataclasses import asdict, replace
from typing import Any

from tqdm import tqdm

from checkpoints.presets import preset
from cli import Parser, run
from comm.cluster import Cluster, load_cluster
from scripts.lib.markdown import table_lines
from scripts.lib.results import add_write_option, results_folder, write_table
from scripts.report.plan_fit import FITTED, TABLE_IV, flops_of_table_v, report_fit
from training.plan import parse_args
from training.planner.collectives import Point, Profile, synthesize
from training.planner.cost import Communication, Prediction, predict
from training.planner.memory import activations
from training.planner.report import as_json
from training.planner.scaling import scaling
from training.planner.search import choose, filtered_meshes, rank, shardings, tiling_meshes
from training.planner.workload import OVERLAPS, Workload
from training.sharding import Mesh, Sharding

GB = 1e9
# The utilization (%) that section VI.B states for 1,024 GPUs. "51 and 52": the text states different values in two places.
STATED_MFU = {"llama-7b": "51", "llama-13b": "51 and 52", "llama-30b": "42 and 43"}

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


# --- when the paper's rows are optimal -------------------------------------------------------------------------------------


def paper_workload(name: str, cluster: Cluster, part: float = 1.0) -> Workload:
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
    overlap = frozenset(OVERLAPS) - {"updates"}
    return Workload(preset(name), Mesh(8, MOST_NODES), cluster, profile, recompute=name == "llama-30b", overlap=overlap)


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
        needed = activations(workload) + workload.reserve_bytes
        judged = {rule: judge(name, workload, rule) for rule in RULES}
        rows[name] = {
            "table_iv": str(own.sharding),
            "chosen": {rule: next(str(s) for (a, b), s in judged[rule] if a <= needed < b) for rule in RULES},
            "chosen_on_1024": as_json(best),
            "of_table_iv": as_json(own),
            "stated_mfu_percent": STATED_MFU[name],
            "gb_beside_states_here": round(needed / GB, 1),
            "gb_beside_states_for_table_iv": {rule: intervals_of(text, judged[rule]) for rule in RULES},
            "communication_above_the_choice": own.communication.total / best.communication.total - 1,
        }
    return rows


def gb(intervals: list[Interval]) -> str:
    return ", ".join(f"{a:g} to {b:g}" for a, b in intervals) or "never"


def nearest_settings(found: list[dict[str, Any]], link_efficiency: float) -> list[list[str]]:
    """Cells of table lines: for each model and rule, the settings of `vary` that change the fewest figures.

    If a row is chosen without any change, the settings that change one figure are listed too.
    """
    shipped = {"link_efficiency": link_efficiency, "part_of_node": 1.0, "nodes_per_leaf": 0}
    lines: list[list[str]] = []
    for name, rule in itertools.product(TABLE_IV, RULES):
        mine = [(f, [k for k in shipped if f[k] != shipped[k]]) for f in found if (f["model"], f["rule"]) == (name, rule)]
        fewest = max(1, min((len(changed) for _, changed in mine), default=1))
        if not mine:
            lines.append([name, rule, "none of the settings", "never"])
        by_memory: dict[str, list[str]] = {}
        for setting, changed in mine:
            if len(changed) <= fewest:
                text = " and ".join(_changed(setting, key) for key in changed) or "as shipped"
                by_memory.setdefault(gb(setting["gb_beside_states"]), []).append(text)
        lines += [[name, rule, "; ".join(texts), memory] for memory, texts in by_memory.items()]
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
    tried = result["settings_tried"]
    sections = [
        _choices(result),
        ["Table IV's row on 1,024 GPUs:", "", *_rows_of_table_iv(result["rows"])],
        [
            "GB of a GPU besides model states and the executor's buffers (activations and reserve) for which the row is chosen:",
            "",
            *_memory_ranges(result["rows"]),
        ],
        ["ZeRO-3's memory for the 30B, GB a GPU (section VI.B.2):", "", *_zero3(result["zero3_30b_gb"])],
        [
            "GB besides model states for which the row is chosen with other bandwidths, changing the fewest figures:",
            "",
            *table_lines(
                ["model", "judged by", "changed figures", "GB besides model states"],
                nearest_settings(result["varied"], result["link_efficiency"]),
            ),
        ],
        [
            f"Rows that are the optimum at once, of {tried} settings of the bandwidths:",
            "",
            *table_lines(["judged by: rows", "settings"], result["joint"].items()),
        ],
        ["Fit of the open figures to the throughputs of table V (16 a model):", "", *_fit(result["fit"])],
        ["FLOPs a token, forward and backward, in 1e11:", "", *_flops(result["flops_per_token"])],
    ]
    caption = "1,024 A800s (all sizes: 8 to 1,024, 30B from 32), 4M tokens a step, sequences of 4,096, micro-batches of one, 80 GB a GPU"
    source = f"{caption}; bandwidths synthesized from clusters/a800.json."
    return "\n\n".join(["\n".join(lines) for lines in sections] + [source + "\n"])


def _choices(result: dict[str, Any]) -> list[str]:
    plans = result["plans"]
    return [
        *table_lines(
            ["model", "table IV", *(f"chosen, {rule}" for rule in RULES)],
            [[name, row["table_iv"], *row["chosen"].values()] for name, row in result["rows"].items()],
        ),
        "",
        f"Plans for 1,024 GPUs: {plans['first_filter']} behind the first filter, {plans['both_filters']} behind both.",
    ]


def _rows_of_table_iv(rows: dict[str, Any]) -> list[str]:
    lines = []
    for name, row in rows.items():
        more, mfu = row["communication_above_the_choice"], 100 * row["of_table_iv"]["mfu"]
        lines.append([name, f"{more:.1%}", f"{mfu:.1f}", row["stated_mfu_percent"]])
    return table_lines(["model", "communication above the chosen plan's", "predicted MFU, %", "stated MFU, %"], lines)


def _memory_ranges(rows: dict[str, Any]) -> list[str]:
    lines = []
    for name, row in rows.items():
        ranges = (gb(intervals) for intervals in row["gb_beside_states_for_table_iv"].values())
        lines.append([name, row["gb_beside_states_here"], *ranges])
    return table_lines(["model", "computed here", *RULES], lines)


def _zero3(rows: list[dict[str, Any]]) -> list[str]:
    lines = [[row["gpus"], row["stated"], f"{row['stated_beside_states']:.1f}", f"{row['here']:.1f}"] for row in rows]
    return table_lines(["GPUs", "stated", "of it besides model states", "computed here"], lines)


def _fit(fit: dict[str, Any]) -> list[str]:
    lines = [[name, *(f"{figures[f]:.3f}" for f in FITTED), f"{figures['rms_error']:.1%}"] for name, figures in fit.items()]
    return table_lines(["models", *(f.replace("_", " ") for f in FITTED), "RMS error"], lines)


def _flops(by_model: dict[str, Any]) -> list[str]:
    columns = {"from table V": "table V", "Llama 1's shape": "Llama 1", "6144 features": "6144 features"}
    lines = [
        [name, *(f"{flops[key] / 1e11:.3f}" if key in flops else "" for key in columns.values())]
        for name, flops in by_model.items()
    ]
    return table_lines(["model", *columns], lines)


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
    parser = Parser(description=__doc__)
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
    write_table("plan-paper", result, text := markdown(result), folder)
    print(text)


if __name__ == "__main__":
    run(main)
