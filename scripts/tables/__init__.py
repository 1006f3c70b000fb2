"""The tables of `scripts/growth.py`, one a file: each measures something, draws it, and says what it shows."""
