"""The paths that probes, routers and Prometheus poll. Standard library only, because the command line's help names them."""

HEALTH_PATHS = ("/health", "/health_generate", "/ping")
METRIC_PATHS = ("/metrics", "/stats", "/load", "/get_load")
