"""What all tests of the server share."""

import pytest

from server import workers

PATIENCE = 300.0


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker process may start slowly while other tests run."""
    assert workers.WAIT_SECONDS < PATIENCE
    monkeypatch.setattr(workers, "WAIT_SECONDS", PATIENCE)
