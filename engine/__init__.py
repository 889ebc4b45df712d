"""Requests in, tokens out: sampling, stopping, generation."""
