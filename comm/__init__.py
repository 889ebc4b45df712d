"""How partial sums become whole: one interface, several ways of summing.

`start(partial) -> Handle`, `handle.wait() -> sum`. Blocking variants wait at once, the ladder one module later.
"""

from comm.choice import KNOWN, Choice, choose
from comm.interface import Communicator, Done, Handle, Local, NoCommunication, Product, Scattered
from comm.process_group import GlooCommunicator, NcclCommunicator
from comm.quantize import Scheme, parse_scheme
from comm.quantized import QuantizedGlooCommunicator, QuantizedNcclCommunicator
from comm.residual import Residual
from comm.simulated import Link, SimulatedLink, parse_link

__all__ = [
    "KNOWN",
    "Choice",
    "Communicator",
    "Done",
    "GlooCommunicator",
    "Handle",
    "Link",
    "Local",
    "NcclCommunicator",
    "NoCommunication",
    "Product",
    "QuantizedGlooCommunicator",
    "QuantizedNcclCommunicator",
    "Residual",
    "Scattered",
    "Scheme",
    "SimulatedLink",
    "choose",
    "parse_link",
    "parse_scheme",
]
