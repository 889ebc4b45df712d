"""How partial sums become whole: one interface, several ways of summing.

`start(partial) -> Handle`, `handle.wait() -> sum`. Blocking variants wait at once, the ladder one module later.
"""

from comm.interface import Communicator, Handle, Local, NoCommunication
from comm.process_group import GlooCommunicator, NcclCommunicator

__all__ = ["Communicator", "GlooCommunicator", "Handle", "Local", "NcclCommunicator", "NoCommunication"]
