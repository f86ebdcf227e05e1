"""Benchmarks: what an engine does, how near that is to what the machine could do, and the same for a server."""
