"""The start and the end of replicas on a local Ray, a cluster for each test: `make cluster-test`."""

import socket
import subprocess

from tests import ROOT
from tests.deploy.test_ray_serve import MODEL, PYTHON
from tests.deploy.test_ray_serve import pytestmark as pytestmark


def test_a_busy_port_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        command = [PYTHON, "-m", "deploy.ray_serve", "--port", port, "--", "--model", MODEL]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == f"error: port {port} of 127.0.0.1 is taken by another program; end that, or choose another one with --port\n"
    )
