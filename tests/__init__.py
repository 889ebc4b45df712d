"""Tests: a folder for each folder of the project, and `support` for what several of them use."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "models"
