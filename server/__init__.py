"""The HTTP server: routes, request schemas, streaming, metrics, the page."""
