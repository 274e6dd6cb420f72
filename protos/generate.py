"""Generate the store's protobuf classes from ``protos/``, or check that the committed ones are current.

    python protos/generate.py            write rayzero/store/_pb/
    python protos/generate.py --check    exit 1 and name the files that differ

The generated code states the protobuf version it needs at least, so the generator is pinned: run it with an
interpreter that has grpcio-tools==1.76.0 (the ``test`` extra installs it).
"""

from __future__ import annotations

import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PINNED = "1.76.0"
PROTOS = Path(__file__).resolve().parent
GENERATED = PROTOS.parent / "rayzero" / "store" / "_pb"


def require_pinned_generator() -> None:
    """Exit unless the pinned grpcio-tools is installed: another version writes other files."""
    try:
        installed = version("grpcio-tools")
    except PackageNotFoundError:
        installed = "none"
    if installed != PINNED:
        sys.exit(f"protos/generate.py needs grpcio-tools=={PINNED}, found {installed}: pip install 'rayzero[test]'")


def generate(out: Path) -> None:
    """Write the classes and their type stubs for every .proto below ``protos/`` into ``out``."""
    from grpc_tools import protoc

    sources = [str(path.relative_to(PROTOS)) for path in sorted(PROTOS.rglob("*.proto"))]
    arguments = ["protoc", f"-I{PROTOS}", f"--python_out={out}", f"--pyi_out={out}", *sources]
    if protoc.main(arguments) != 0:
        sys.exit("protoc failed")


def generated_files(root: Path) -> dict[Path, bytes]:
    """Relative path -> content of every generated file below ``root``."""
    return {path.relative_to(root): path.read_bytes() for path in sorted(root.rglob("*_pb2.py*"))}


def check() -> None:
    """Exit 1 when the committed files are not what the generator writes now."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = generated_files(Path(folder))
    committed = generated_files(GENERATED)
    stale = sorted(str(path) for path in fresh.keys() | committed.keys() if fresh.get(path) != committed.get(path))
    if stale:
        sys.exit(f"generated code differs from protos/: {', '.join(stale)}; run python protos/generate.py")
    print(f"{len(fresh)} generated files are current")


def main() -> None:
    """Generate, or with ``--check`` compare."""
    require_pinned_generator()
    if sys.argv[1:] == ["--check"]:
        check()
    elif not sys.argv[1:]:
        generate(GENERATED)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
