"""What settings say of themselves: one text a field, shown by ``help()``, the command line and editors."""

from __future__ import annotations

import inspect
import pydoc
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import rayzero
from rayzero.config import ConfigModel, RunConfig, ScalingConfig, TelemetryConfig, ZeroConfig, describe_settings
from rayzero.recipes.recipe import RecipeConfig

MODELS = [ZeroConfig, ScalingConfig, RunConfig, TelemetryConfig, RecipeConfig]


@pytest.mark.parametrize("model", MODELS)
def test_every_field_has_a_sentence_and_help_shows_each_in_one_line(model: type[ConfigModel]) -> None:
    shown = pydoc.plain(pydoc.render_doc(model)).splitlines()
    for name, field in model.model_fields.items():
        assert field.description, f"{model.__name__}.{name} has no docstring"
        lines = [line for line in shown if line.startswith(f" |      {name}: ")]
        assert len(lines) == 1, name
        assert "  " in lines[0].removeprefix(" |      "), "unit and default, then what it is"
        assert lines[0].endswith((".", ")", ":")), f"no sentence: {lines[0]}"
    constructor = next(line for line in shown if line.startswith(f" |  {model.__name__}("))
    assert constructor == f" |  {model.__name__}(*, setting=value, ...)"
    assert not any(
        "Annotated" in line or "FieldInfo" in line for line in shown if "Settings" not in line and " = " not in line
    )


def test_a_line_has_unit_and_default_as_python_or_yaml_write_them() -> None:
    told = pydoc.plain(pydoc.render_doc(ScalingConfig))
    assert "      num_workers: int = 2  Rank workers: data-parallel" in told
    assert "      memory_per_worker: bytes or None = None  Bytes of host" in told
    assert "      placement_timeout: seconds = 30.0  Seconds to wait" in told
    settings = describe_settings(RecipeConfig)
    assert any(line.startswith("zero.gpu_param_memory_budget: bytes = 2GiB  Bytes of gath") for line in settings)
    assert any(line.startswith("zero.max_cpu_memory_mb: MiB or null = null  ") for line in settings)
    assert any(line.startswith("scaling.memory_per_worker: bytes or null = null  ") for line in settings)
    assert any(line.startswith('zero.precision: "fp32" | "bf16" | "fp16" = "fp32"  ') for line in settings)
    assert any(line.startswith("run.telemetry.enabled: bool = true  ") for line in settings)


def test_names_can_be_completed() -> None:
    assert list(inspect.signature(ScalingConfig).parameters) == list(ScalingConfig.model_fields)
    assert inspect.signature(ScalingConfig).parameters["num_workers"].default == 2


def test_what_type_checkers_see_of_constructors_and_setters_is_made_from_the_fields() -> None:
    made = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "settings.py"))
    assert made["STUB"].read_text() == made["stub"](), "run scripts/settings.py"


USER = """
from pathlib import Path
from rayzero.config import RunConfig, ScalingConfig, TelemetryConfig, ZeroConfig

zero = ZeroConfig(cpu_memory_budget="4GiB", gpu_param_memory_budget=1 << 30, precision="bf16", units=["Block"])
budget: int = zero.gpu_param_memory_budget
allowed: int | None = zero.cpu_memory_budget
depth: int = zero.with_compression("fp16").with_prefetch_buffer_size(2).prefetch_buffer_size
scaling = ScalingConfig(num_workers=2, memory_per_worker="1GiB", memory_per_optimizer=None)
reserved: int | None = scaling.memory_per_worker
run = RunConfig(name="demo", storage_path=Path("runs"), resume=Path("x"), telemetry=TelemetryConfig(port=0))
place: str = run.storage_path
"""
WRONG = """
from rayzero.config import ScalingConfig, ZeroConfig

ZeroConfig(precision="fp8")
ZeroConfig(cpu_memory_budget=4.5)
ScalingConfig(num_workrs=2)
ZeroConfig().with_prefetch_buffer_size("2")
"""


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_user_code_with_text_sizes_passes_mypy_strict_and_wrong_code_does_not(tmp_path: Path) -> None:
    """With pydantic's plugin; `scripts/check` reads RayZero's own uses without it."""
    heavy = "mypy-" + ",".join(
        f"rayzero.{part}.*" for part in ("checkpoint", "cluster", "engine", "hybrid")
    )  # torch, ray
    options = (
        f"[mypy]\nstrict = True\nfollow_imports = silent\nplugins = pydantic.mypy\n[{heavy}]\nfollow_imports = skip\n"
    )
    (tmp_path / "mypy.ini").write_text(options)
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "wrong.py").write_text(WRONG)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "user.py", "wrong.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = done.stdout.splitlines()
    assert [line.split(": error:")[0] for line in found if ": error:" in line] == [
        "wrong.py:4",
        "wrong.py:5",
        "wrong.py:6",
        "wrong.py:7",
    ]


def test_the_version_is_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import version

    from rayzero.cli import main

    assert rayzero.__version__ == version("rayzero")
    monkeypatch.setattr(sys, "argv", ["rayzero", "--version"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"rayzero {rayzero.__version__}\n"


def test_the_command_line_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    from rayzero.cli.train import train

    train(help_config=True)
    out = capsys.readouterr().out
    for group, model in (("", RecipeConfig), ("zero.", ZeroConfig), ("scaling.", ScalingConfig), ("run.", RunConfig)):
        for name, field in model.model_fields.items():
            nested = isinstance(field.get_default(call_default_factory=True), ConfigModel)
            assert nested or f"\n{group}{name}: " in "\n" + out
