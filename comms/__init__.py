"""All-reduces and all-gathers between tensor-parallel ranks: one interface (`comms/interface.py`) and several communicators.

`comms/registry.py` builds them by name. `comms/residual.py` is what the model uses.
"""

from comms.hierarchical import HierarchicalCommunicator, fastest_between_hosts
from comms.interface import Communicator, Done, Local, NoCommunication, PendingAllReduce
from comms.process_group import GlooCommunicator, NcclCommunicator, TreeCommunicator
from comms.quantize import Scheme, parse_scheme
from comms.quantized import QuantizedGlooCommunicator, QuantizedNcclCommunicator
from comms.residual import Residual
from comms.simulated import Link, SimulatedLink, parse_link

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
