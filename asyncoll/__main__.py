"""`python -m asyncoll` is the command `asyncoll`."""

from asyncoll.cli import main

main(prog_name="asyncoll")
