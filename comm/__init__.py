"""All-reduces and all-gathers between tensor-parallel ranks: one interface (`comm/interface.py`) and several communicators.

`comm/registry.py` builds them by name. `comm/residual.py` is what the model uses.
"""

from comm.hierarchical import HierarchicalCommunicator, fastest_between_hosts
from comm.interface import Communicator, Done, Local, NoCommunication, PendingAllReduce
from comm.process_group import GlooCommunicator, NcclCommunicator, TreeCommunicator
from comm.quantize import Scheme, parse_scheme
from comm.quantized import QuantizedGlooCommunicator, QuantizedNcclCommunicator
from comm.residual import Residual
from comm.simulated import Link, SimulatedLink, parse_link

__all__ = [
    "Communicator",
    "Done",
    "GlooCommunicator",
    "HierarchicalCommunicator",
    "Link",
    "Local",
    "NcclCommunicator",
    "NoCommunication",
    "PendingAllReduce",
    "QuantizedGlooCommunicator",
    "QuantizedNcclCommunicator",
    "Residual",
    "Scheme",
    "SimulatedLink",
    "TreeCommunicator",
    "fastest_between_hosts",
    "parse_link",
    "parse_scheme",
]
