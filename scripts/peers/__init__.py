"""Contenders of bench.py --peers, each a module with `make(shape, **options) -> Peer`, run by worker.py."""
