"""The generated pages have everything, and what the others quote exists."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from promql_parser import parse

import rayzero
from rayzero import errors
from rayzero.cli import app
from rayzero.config import describe_settings
from rayzero.errors import RayZeroError
from rayzero.recipes.recipe import RecipeConfig
from rayzero.telemetry.names import METRICS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from docs.hooks import commands, docstrings, failures, metrics, results, settings  # noqa: E402
from docs.hooks.prose import prose  # noqa: E402


def test_every_setting_has_its_entry_with_type_default_and_all_of_its_text() -> None:
    page = settings.page()
    lines = [line for line in describe_settings(RecipeConfig) if line and not line.startswith("#")]
    assert len(lines) > 90
    for line in lines:
        name = line.partition(":")[0]
        assert f"#### `{name}` {{ #{name} }}\n" in page
    assert '`"fp32" | "bf16" | "fp16"`, default `"fp32"`' in page
    assert "`bytes or null`, default `null`" in page
    for _, model in settings.groups():
        for field in model.model_fields.values():
            assert field.description
    assert "torch.amp.GradScaler as in any loop." in page, "the second sentence, too"


def test_every_command_and_option_is_listed() -> None:
    page = commands.page()
    for name, command in commands.GROUP.commands.items():
        section = page.partition(f"## rayzero {name} {{")[2].partition("\n## ")[0]
        assert section, name
        for param in command.params:
            assert (param.opts[0] if param.opts[0].startswith("-") else param.help[:20]) in section
    assert app.info.name == "rayzero"


def test_every_metric_has_a_query_that_reads_it() -> None:
    found = metrics.queries()
    page = metrics.page()
    for metric in METRICS:
        query, _, _ = found[metric.name]
        assert metric.name in query
        assert "$" not in query
        parse(query)
        assert f"#### `{metric.name}` {{" in page
    assert page.count("\n## ") == len(metrics.SECTIONS)


def test_every_error_is_in_the_tree() -> None:
    page = failures.page()
    names = [name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, RayZeroError)]
    assert len(names) > 18
    assert sorted(re.findall(r'class="name">(\w+)<', page)) == sorted(names)
    assert "RayZeroError</code>](#rayzeroerror) | 1 |" in page
    assert "ConfigError</code>](#configerror) | 2 |" in page


SOURCE = "\n".join(path.read_text() for path in (ROOT / "rayzero").rglob("*.py"))
MESSAGES = re.findall(r"^\| `([^`]*)` \|", (ROOT / "docs/reference/errors.md").read_text(), re.M)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_one_of_the_code(message: str) -> None:
    for part in filter(None, (part.strip() for part in message.split("…"))):
        assert part in re.sub(r'"\n\s*f?"', "", SOURCE), part


def test_there_are_common_messages() -> None:
    assert len(MESSAGES) > 15


def test_the_api_page_has_every_public_name() -> None:
    listed = re.findall(r"^::: rayzero\.(\w+)$", (ROOT / "docs/reference/api.md").read_text(), re.M)
    assert sorted(listed) == sorted(rayzero.__all__)


QUOTED = re.compile(r"\d+\.\d+")


@pytest.mark.parametrize("page", ["docs/performance.md", "docs/comparison.md"])
def test_measured_figures_are_those_of_results(page: str) -> None:
    measured = (ROOT / "lab" / "RESULTS.md").read_text()
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.S)
    figures = QUOTED.findall(re.sub(r"\d+\.\d+\.\d+\S*|\d{4}\.\d{5}", "", text))  # versions and papers aside
    assert [one for one in figures if one not in measured] == []


def test_a_table_of_results_is_taken_over_and_a_missing_one_is_an_error() -> None:
    assert "**rayzero**" in results.tables("1 step: GPT, 33.6M parameters")
    with pytest.raises(LookupError, match="no section 'nothing'"):
        results.tables("1 nothing")


def test_prose_is_not_taken_for_markup() -> None:
    assert prose("a *b* in `c*d`\n  and <e>") == r"a \*b\* in `c*d` and &lt;e\>"


def test_lines_of_a_docstring_that_describe_parameters_become_a_section() -> None:
    text = "What it does.\n\nmodel: the same on\n    every rank.\nother: no parameter.\n\nRaises X."
    made = docstrings.with_parameters(text, {"model"})
    assert made == (
        "What it does.\n\nother: no parameter.\n\nRaises X.\n\nArgs:\n    model: the same on\n        every rank."
    )
    assert docstrings.with_parameters("Nothing here.", {"model"}) == "Nothing here."
