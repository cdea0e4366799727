"""`python -m tracetools`."""

from tracetools.cli import main

main(prog_name="tracetools")
