"""The `profiles` command: which stack profiles there are, and whether one fits a training environment.

In: arguments. Out: text on the terminal, a JSON file, an exit status. Loads nothing heavy.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tracetools.errors import EXIT_BAD_DATA, EXIT_OK


@click.group(invoke_without_command=True)
@click.pass_context
def profiles(ctx: click.Context) -> None:
    """List the stack profiles: how each training stack is hooked, named and classified."""
    from tracetools.stackprofile import load_profile, profile_names

    if ctx.invoked_subcommand is not None:
        return
    for name in profile_names():
        found = load_profile(name)
        click.echo(
            f"{name:14} {len(found.hooks)} hooks, {len(found.regions)} region rules, {len(found.kernel_classes)} kernel classes"
        )


@profiles.command("check")
@click.argument("name")
@click.option(
    "--python", default=sys.executable, metavar="PYTHON", help="The Python that trains. It needs nothing of tracetools."
)
@click.option("--json", "json_file", metavar="FILE", help="Write the result as JSON; - for the terminal.")
@click.pass_context
def check_profile(ctx: click.Context, name: str, python: str, json_file: str | None) -> None:
    """Do the hook targets of profile NAME (a name, or the path of a TOML file) exist in a training environment?

    Their modules are imported, in processes of their own. Exit status 1: a target is gone although its package is there.
    """
    from tracetools.collect.check import check
    from tracetools.output import write_atomically
    from tracetools.render.profilecheck import check_json, check_lines
    from tracetools.stackprofile import load_profile

    found = check(load_profile(name), python)
    if json_file == "-":
        click.echo(check_json(found), nl=False)
    else:
        click.echo("\n".join(check_lines(found)))
        if json_file:
            write_atomically(Path(json_file), check_json(found))
    ctx.exit(EXIT_BAD_DATA if found.faults else EXIT_OK)
