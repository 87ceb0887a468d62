"""`python -m lowtide` is the console script."""

from lowtide.cli import main

main()
