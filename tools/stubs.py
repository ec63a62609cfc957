"""Generate the Python modules of the .proto files.

They get a descriptor pool of their own: other packages, such as tritonclient, register the same
names in the default one, and both must fit into one process.

    python tools/stubs.py            write them beside the .proto
    python tools/stubs.py --check    fail if they differ from the .proto
"""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = (
    Path("headrace", "gateway", "open_inference.proto"),
    Path("headrace", "models", "triton_config.proto"),
)
SUFFIXES = ("_pb2.py", "_pb2.pyi")


def generate(proto: Path, folder: Path) -> None:
    """Write the modules of a .proto into a folder."""
    out = str(folder)
    include = str(files("grpc_tools") / "_proto")
    call = ["protoc", f"-I{ROOT}", f"-I{include}", f"--python_out={out}", f"--pyi_out={out}"]
    if protoc.main([*call, str(ROOT / proto)]):
        raise SystemExit("stubs: protoc failed")
    module = folder / proto.with_name(proto.stem + "_pb2.py")
    code = module.read_text(encoding="utf-8")
    default, own = "_descriptor_pool.Default()", "_descriptor_pool.DescriptorPool()"
    if code.count(default) != 1:
        raise SystemExit(f"stubs: expected {default} once in the generated module")
    module.write_text(code.replace(default, own), encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Write the modules, or compare them with those that are there."""
    stale: list[Path] = []
    with TemporaryDirectory() as scratch:
        for proto in PROTOS:
            generate(proto, Path(scratch))
            for suffix in SUFFIXES:
                name = proto.with_name(proto.stem + suffix)
                content = (Path(scratch) / name).read_bytes()
                if "--check" not in arguments:
                    (ROOT / name).write_bytes(content)
                elif content != (ROOT / name).read_bytes():
                    stale.append(name)
    for name in stale:
        print(f"stubs: {name} differs from its .proto: run `make stubs`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
