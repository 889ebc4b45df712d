"""CONTRIBUTING.md names files that exist."""

import re

from tests import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def test_its_recipes_name_files_that_exist() -> None:
    files = {name for name in re.findall(r"`([\w./]+\.(?:py|md))`", TEXT) if "NAME" not in name}
    assert len(files) > 20 and [name for name in sorted(files) if not (ROOT / name).is_file()] == []
