"""The planner for serving. A program on top, as `training/` and `scripts/` are: nothing else of `server/` imports it."""
