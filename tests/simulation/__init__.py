"""A deterministic simulation of the frontend's client of the engine, and of the engine on several ranks. See life.py."""
