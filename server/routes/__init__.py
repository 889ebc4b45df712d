"""The routes that have no module of their own beside what they run."""
