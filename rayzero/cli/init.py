"""``rayzero init``: writes a recipe with every setting, what it means and its default."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from rayzero.errors import ConfigError


def init(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE.yaml] [key=value]...", help="The file to write, and settings in it."),
    ] = None,
) -> None:
    """Write a commented recipe for rayzero train: recipe.yaml, or the named file. Refuses to replace a file."""
    given = arguments or []
    paths, chosen = [one for one in given if "=" not in one], [one for one in given if "=" in one]
    if len(paths) > 1:
        raise ConfigError(f"give one file to write, not {' and '.join(paths)}; settings look like key=value")
    path = Path(paths[0] if paths else "recipe.yaml")
    text = recipe_text(chosen)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} exists already; name another file: rayzero init OTHER.yaml") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    then = f"rayzero train {shlex.quote(str(path))} --dry-run"
    typer.echo(f"{path}: every setting with its default; edit it, then: {then}")


def recipe_text(chosen: list[str]) -> str:
    """The recipe's text. ``chosen``: ``key=value`` texts, which are checked. Raises ConfigError."""
    from rayzero import __version__
    from rayzero.config import apply_overrides, commented_settings
    from rayzero.recipes.recipe import RecipeConfig, in_groups

    settings = apply_overrides({}, chosen)
    RecipeConfig.from_mapping(settings)
    head = [
        f"# A recipe of RayZero {__version__}: rayzero train RECIPE.yaml. Every setting is here, with its default.",
        "# To change one, remove the # before its name and edit the value. Longer texts: help(rayzero.ZeroConfig).",
        "",
    ]
    return "\n".join([*head, *commented_settings(RecipeConfig, in_groups(settings))]) + "\n"
