"""The communicators by name: what each runs on, errors in names and options, and that each name builds what it says."""

import pytest
import torch

from comms.private_gloo import PRIVATE_GLOO
from comms.quantize import WIDTHS
from comms.registry import COMMUNICATORS, KNOWN, choose, is_quantized
from errors import UserError
from tests.support.ranks import Ranks
from tp import World


@pytest.mark.parametrize("name", ["int5", "int", "", "gloo:64", "INT8", "int8x"])
def test_an_unknown_name_lists_all(name: str) -> None:
    with pytest.raises(UserError) as error:
        choose("cpu", name)
    message = str(error.value)
    assert message.startswith(f"unknown communicator {name!r}")
    assert all(known in message for known in ("gloo (CPU)", "nccl (CUDA", "one-shot", "two-shot", "auto", *WIDTHS, "int8:64"))


def test_what_runs_on_which_device() -> None:
    assert choose("cpu").backend == choose("cpu", "int4").backend == PRIVATE_GLOO
    assert choose("cuda").backend == choose("cuda", "int6:64").backend == "nccl"
    assert choose("cuda").name == "auto"
    assert choose("cpu", "auto").backend == PRIVATE_GLOO
    wrong = [("cpu", name, "gloo") for name in ("nccl", "one-shot", "two-shot")]
    for device, name, other in (*wrong, ("cuda", "gloo", "auto")):
        with pytest.raises(UserError, match=f"--comm {name} does not run on --device {device}; use {other}"):
            choose(device, name)
    with pytest.raises(UserError, match="power of two"):
        choose("cuda", "int8:100")


def test_a_budget_is_for_auto() -> None:
    assert choose("cuda", "auto", error_budget=0.01).error_budget == 0.01
    for name, budget in (("nccl", 0.01), ("int8", 0.01), ("auto", -0.1), ("auto", 1.0), ("auto", float("nan"))):
        with pytest.raises(UserError, match="comm-error-budget"):
            choose("cuda", name, error_budget=budget)
    with pytest.raises(UserError, match="comm-error-budget"):
        choose("cpu", error_budget=0.01)


def test_every_name_runs_somewhere_and_is_listed() -> None:
    for name, entry in COMMUNICATORS.items():
        assert entry.devices and name in KNOWN
        assert all(choose(device, name).name == name for device in entry.devices)
    assert {name for name in COMMUNICATORS if is_quantized(name)} == set(WIDTHS)
    exact = {name for name, entry in COMMUNICATORS.items() if choose(entry.devices[0], name).is_exact}
    assert exact == COMMUNICATORS.keys() - WIDTHS.keys()


def built(world: World) -> dict[str, tuple[str, list[float]]]:
    """The name of each CPU communicator, and the result of one of its all-reduces."""
    found = {}
    one_host = (name for name in COMMUNICATORS if name != "hierarchical")
    for name in (name for name in one_host if "cpu" in COMMUNICATORS[name].devices):
        communicator = choose("cpu", name).build()
        found[name] = communicator.name, communicator.all_reduce(torch.full((2,), 1.0 + world.rank)).tolist()
    return found


def test_each_name_builds_its_communicator(ranks: Ranks) -> None:
    for found in ranks.run(2, built):
        assert {name: communicator for name, (communicator, _) in found.items()} == {name: name for name in found} | {
            "auto": "gloo"
        }
        assert all(total == pytest.approx([3.0, 3.0], rel=0.02) for _, total in found.values())
