"""Ports of servers: a free one, and whether a server will be able to listen, before anything heavy starts. Standard library only."""

import errno
import os
import socket
import stat

from errors import UserError


def free_port() -> int:
    """A port of 127.0.0.1 on which nothing listens now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def check_port(host: str, port: int) -> None:
    """Raises UserError if `port` of `host` cannot be bound now. A server binds it later."""
    where = f"port {port} of {host}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as e:
        raise UserError(f"--host {host} is no address ({e.strerror}); give one of this machine's") from None
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the frontend does
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(address)
            except OSError as e:
                if e.errno == errno.EADDRINUSE:
                    raise UserError(
                        f"{where} is taken by another program; end that, or choose another one with --port"
                    ) from None
                reason = os.strerror(e.errno or 0)
                raise UserError(f"cannot listen on {where} ({reason}); choose others with --host and --port") from None


def check_socket(path: str) -> None:
    """Raises UserError if no Unix socket can be made at `path`. Removes one that nobody listens on."""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            if probe.connect_ex(path) == errno.ECONNREFUSED and stat.S_ISSOCK(os.stat(path).st_mode):
                os.unlink(path)
            probe.bind(path)
        os.unlink(path)
    except OSError as e:
        what = f"cannot listen on --uds {path} ({e.strerror or e})"
        raise UserError(f"{what}; name another path, or end the program that listens there") from None
