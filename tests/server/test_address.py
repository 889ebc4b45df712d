"""Where the server listens and how it is found: Unix sockets, HTTPS, a proxy's path, the banner, and answers before the model is here."""

import asyncio
import re
import shlex
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from checkpoints import hub
from errors import UserError
from ranks.ports import free_port
from server.downloading import answering, check_address
from server.frontend import banner
from server.settings import Settings
from tests.support.command_line import HYBRID
from tests.support.server_process import ServerProcess
from tests.support.server_thread import Site, ready, wait_for


def make_certificate(folder: Path, *more: str) -> tuple[str, str]:
    """A certificate for this host and its key."""
    files = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "9", "-subj", "/CN=localhost", *(more or ["-nodes"])]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, *names, "-out", files[0], "-keyout", files[1]], check=True, capture_output=True)
    return files


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


def client(settings: Settings) -> httpx.Client:
    """A client that trusts the server's certificate alone."""
    verify = ssl.create_default_context(cafile=settings.ssl_certfile) if settings.ssl_certfile else False
    transport = httpx.HTTPTransport(uds=settings.uds, verify=verify)
    port = "" if settings.uds else f":{settings.port}"
    return httpx.Client(transport=transport, base_url=f"http{'s' * bool(settings.ssl_certfile)}://localhost{port}", timeout=60)


@pytest.fixture
def short(tmp_path: Path) -> Iterator[Path]:
    """A folder whose path leaves room in the 107 bytes of a socket's."""
    link = Path("/tmp") / f"rung-{tmp_path.name[-40:]}-{free_port()}"
    link.symlink_to(tmp_path)
    yield link
    link.unlink()


# --- the whole server ----------------------------------------------------------------------------------------------------


def test_a_server_with_a_certificate_and_its_model_as_an_argument(certificate: tuple[str, str]) -> None:
    flags = HYBRID, "--ssl-certfile", certificate[0], "--ssl-keyfile", certificate[1]
    defaults = "--override-generation-config", '{"max_new_tokens": 3, "temperature": 0}'
    with ServerProcess(*flags, *defaults, ranks=2, environ={"RUNG_MODEL": "no/such"}) as server:
        server.http = client(Settings(model=HYBRID, port=server.port, ssl_certfile=certificate[0]))
        server.ready()
        answers = [server.http.post("/v1/completions", json={"prompt": "Once upon"}).json() for _ in range(2)]
        assert [one["usage"]["completion_tokens"] for one in answers] == [3, 3]
        assert answers[0]["choices"] == answers[1]["choices"]
        assert f"curl https://127.0.0.1:{server.port}/v1/completions" in server.log
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{server.port}/health")


# --- the frontend --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secure", [False, True])
def test_a_unix_socket(short: Path, certificate: tuple[str, str], secure: bool) -> None:
    files = dict(zip(("ssl_certfile", "ssl_keyfile"), certificate, strict=True)) if secure else {}
    site = Site(short, uds=str(short / "rung"), **files)
    site.http = client(site.settings)
    site.start()
    try:
        assert site.http.get("/health").json() == {"status": "ready"}
        body = {"model": site.server.service.model_name, "messages": [{"role": "user", "content": "Hi"}]}
        with site.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
            assert list(answer.iter_lines())[-2] == "data: [DONE]"
        with pytest.raises(UserError, match="in use"):
            check_address(site.settings)
        said = banner(site.server.service, ready(), site.server._address())
        command = re.search(r"curl [\s\S]*?}'", said)
        assert command
        words = shlex.split(command[0].replace("\\\n", ""))
        assert words[:4] == ["curl", "--unix-socket", str(short / "rung"), f"http{'s' * secure}://localhost/v1/completions"]
        assert said.rstrip().endswith(f"/docs   on the socket {short / 'rung'}")
    finally:
        site.close()


def test_clients_of_a_unix_socket_are_those_that_the_proxy_names(short: Path) -> None:
    site = Site(short, uds=str(short / "rung"), trusted_proxy=("127.0.0.1",)).start(engine=False)
    try:
        seen = []
        http = client(site.settings)
        original = site.server.config.loaded_app.app  # behind uvicorn's middleware

        async def spy(scope, receive, send):  # type: ignore[no-untyped-def]
            seen.append(scope["client"][0])
            await original(scope, receive, send)

        site.server.config.loaded_app.app = spy
        http.get("/health")
        http.get("/health", headers={"X-Forwarded-For": "192.0.2.7"})
        assert seen == ["127.0.0.1", "192.0.2.7"]
    finally:
        site.close()


def test_the_path_of_a_proxy_is_in_the_description(tmp_path: Path) -> None:
    site = Site(tmp_path, root_path="/models/llm/").start()
    try:
        assert site.http.get("/openapi.json").json()["servers"] == [{"url": "/models/llm"}]
        assert site.http.get("/v1/models").status_code == 200 and site.http.get("/health").status_code == 200
        assert "href=openapi.json" in site.http.get("/docs").text
    finally:
        site.close()


def test_the_banner_waits_until_the_address_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    gate, startup, site = threading.Event(), uvicorn.Server.startup, Site(tmp_path)

    async def late(*given: Any, **more: Any) -> None:
        while not gate.is_set():
            await asyncio.sleep(0.01)
        await startup(*given, **more)

    monkeypatch.setattr(uvicorn.Server, "startup", late)
    site.thread.start()
    site.engine.start()
    wait_for(lambda: site.server.client.ready)
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.1), site.server._loop).result(60)
    assert "Serving" not in capfd.readouterr().err
    gate.set()
    said = ""

    def is_said() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return "Serving" in said

    wait_for(is_said)
    assert site.health() == "ready"
    site.close()


# --- before the frontend -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("uds", "secure"), [(True, False), (False, True), (True, True)])
def test_answers_while_a_model_is_fetched(
    short: Path, certificate: tuple[str, str], uds: bool, secure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"uds": str(short / "rung")} if uds else {"port": free_port()}
    files = dict(zip(("ssl_certfile", "ssl_keyfile"), certificate, strict=True)) if secure else {}
    settings = Settings(model="m", **place, **files)  # type: ignore[arg-type]
    check_address(settings)
    with answering(settings), hub.tqdm(total=141_000_000_000, initial=41_000_000_000, disable=True) as bar:
        bar.n = 41_000_000_000
        monkeypatch.setattr(hub, "bar", bar)
        with socket.socket(socket.AF_UNIX if uds else socket.AF_INET) as silent:  # whose handshake never comes
            silent.connect(settings.uds or ("127.0.0.1", settings.port))
            answer = client(settings).get("/health")
        assert answer.status_code == 503 and answer.json()["status"] == "downloading, 41 of 141 GB"
    with pytest.raises(httpx.ConnectError):
        client(settings).get("/health")
    check_address(settings)


def test_sockets_that_cannot_be_had(short: Path) -> None:
    (file := short / "file").write_text("kept")
    left = short / "left"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(left))
        listener.listen()
        for path, why in (
            (file, "in use"),
            (short, "in use"),
            (short / "none" / "rung", "No such"),
            (short / ("x" * 200), "too long"),
            (left, "in use"),
        ):
            with pytest.raises(UserError, match=f"cannot listen on --uds {path} .*{why}.*; name another path"):
                check_address(Settings(model="m", uds=str(path)))
        assert file.read_text() == "kept" and left.exists()
    check_address(Settings(model="m", uds=str(left)))  # its program has ended
    assert not left.exists()


def test_certificates_that_cannot_be_read(tmp_path: Path, certificate: tuple[str, str]) -> None:
    (tmp_path / "locked").mkdir()
    (tmp_path / "text").write_text("no certificate")
    locked = make_certificate(tmp_path / "locked", "-passout", "pass:secret")
    other = make_certificate(tmp_path)
    for cert, key in (
        ("/no/such", None),
        (str(tmp_path / "text"), None),
        (certificate[0], None),
        (certificate[0], other[1]),
        locked,
    ):
        with pytest.raises(UserError, match="give no certificate with its key"):
            check_address(Settings(model="m", port=free_port(), ssl_certfile=cert, ssl_keyfile=key))
    both = tmp_path / "both"
    both.write_text("".join(Path(file).read_text() for file in other))
    check_address(Settings(model="m", port=free_port(), ssl_certfile=str(both)))
