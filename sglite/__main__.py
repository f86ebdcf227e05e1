"""`python -m sglite` is the `sglite` command."""

from __future__ import annotations

from sglite.cli import main

if __name__ == "__main__":
    main()
