"""The planner for serving. It reads the engine's rules, and nothing else imports it."""
