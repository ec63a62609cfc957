"""`python -m headrace.protocol.schemas [--check]`: write the contract's files, or list what is
wrong with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import yaml  # in the dependency group `test`: users of Headrace do not write schemas

from headrace.errors import Rejected
from headrace.protocol.schemas.asyncapi import asyncapi
from headrace.protocol.schemas.golden import SAMPLES, GoldenSample
from headrace.protocol.schemas.types import schema_files


def generated_files() -> dict[str, str]:
    """Return the texts of the generated files by name."""
    document = yaml.safe_dump(asyncapi(), sort_keys=False, allow_unicode=True, width=100)
    return {"asyncapi.yaml": document, **schema_files()}


def faults(directory: Path) -> Iterator[str]:
    """Yield what is missing, stale or broken under a directory of schemas."""
    expected = generated_files()
    for name, text in expected.items():
        path = directory / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            yield f"{path}: stale; run `python -m headrace.protocol.schemas`"
    for path in directory.glob("*.schema.json"):
        if path.name not in expected:
            yield f"{path}: no such type any more"
    golden = directory / "golden"
    for name, sample in SAMPLES.items():
        yield from _sample_faults(golden / f"{name}.bin", sample)
    for path in golden.glob("*.bin"):
        if path.stem not in SAMPLES:
            yield f"{path}: no code reads this sample any more"


def _plain(sample: GoldenSample, content: bytes) -> bytes | None:
    try:
        return sample.plain(content)
    except Rejected:
        return None


def _sample_faults(path: Path, sample: GoldenSample) -> Iterator[str]:
    if not path.is_file():
        yield f"{path}: missing; run `python -m headrace.protocol.schemas`"
        return
    content = path.read_bytes()
    if _plain(sample, content) != sample.plain(sample.write()):
        yield f"{path}: the code writes other bytes now; a golden sample is never edited"
    try:
        sample.read(content)
    except Rejected as error:
        yield f"{path}: cannot be read any more: {error}"
        return
    description = path.with_suffix(".json")
    if not description.is_file():
        yield f"{description}: missing; run `python -m headrace.protocol.schemas`"
    elif description.read_text(encoding="utf-8") != sample.described(content) + "\n":
        yield f"{description}: the sample is read differently now"


def write(directory: Path) -> None:
    """Write the generated files, and the golden samples that do not exist yet."""
    golden = directory / "golden"
    golden.mkdir(parents=True, exist_ok=True)
    for name, text in generated_files().items():
        (directory / name).write_text(text, encoding="utf-8")
    for name, sample in SAMPLES.items():
        path = golden / f"{name}.bin"
        if not path.exists():
            content = sample.write()
            path.write_bytes(content)
            path.with_suffix(".json").write_text(sample.described(content) + "\n", encoding="utf-8")


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; fail when something is not right.")
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("schemas"),
    show_default=True,
)
def main(*, check: bool, directory: Path) -> None:
    """Generate the contract's files from the Python types."""
    if not check:
        write(directory)
    found = list(faults(directory))
    for fault in found:
        click.echo(fault, err=True)
    if found:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
