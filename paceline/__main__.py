"""`python -m paceline` is `paceline`."""

from paceline.cli import main

main()
