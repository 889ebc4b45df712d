"""What all tests of the server share."""

import pytest

from server import workers


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker process may start slowly while other tests run."""
    monkeypatch.setattr(workers, "WAIT_SECONDS", 300.0)
