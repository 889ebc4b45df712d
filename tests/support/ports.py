"""Ports for the servers that tests start."""

import socket

_reserved: list[socket.socket] = []  # never closed: a port stays reserved until this process ends


def free_port() -> int:
    """A port of 127.0.0.1 for one server of a test. No other program gets it from the system while the server still starts.

    Linux lets a server listen on it nevertheless, because the socket that reserves it does not listen and both set SO_REUSEADDR,
    as uvicorn and torch's stores do.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    _reserved.append(reserved)
    port: int = reserved.getsockname()[1]
    return port
