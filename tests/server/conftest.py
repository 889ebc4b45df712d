"""What all tests of the server share."""

import pytest

from server import grammar
from server.workers import Workers

PATIENCE = 300.0


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker process may start slowly while other tests run."""
    assert Workers.run.__kwdefaults__["wait_seconds"] < PATIENCE
    monkeypatch.setitem(Workers.run.__kwdefaults__, "wait_seconds", PATIENCE)
    monkeypatch.setattr(grammar, "WAIT_SECONDS", PATIENCE)
