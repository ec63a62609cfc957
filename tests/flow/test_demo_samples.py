"""The sample files of the demo: they are what their labels say."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import pickle
import plistlib
import sqlite3
import tarfile
import tomllib
import wave
import zipfile
import zlib
from collections.abc import Callable
from configparser import ConfigParser
from email import message_from_bytes
from xml.etree import ElementTree as ET

import numpy as np
import onnx
import pytest
import yaml

from headrace.tools.demo.questions import load_samples


def _zip_names(content: bytes) -> list[str]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.testzip() is None
        return archive.namelist()


def _sqlite_tables(content: bytes) -> int:
    database = sqlite3.connect(":memory:")
    try:
        database.deserialize(content)
        return int(database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
    finally:
        database.close()


def _tar_names(content: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return archive.getnames()


def _wav_frames(content: bytes) -> int:
    with wave.open(io.BytesIO(content)) as sound:
        return int(sound.getnframes())


def _png_rows(content: bytes) -> bytes:
    start = content.index(b"IDAT")
    size = int.from_bytes(content[start - 4 : start])
    return zlib.decompress(content[start + 4 : start + 4 + size])


def _ini_sections(content: bytes) -> list[str]:
    parser = ConfigParser()
    parser.read_string(content.decode())
    return parser.sections()


def _onnx_nodes(content: bytes) -> int:
    model = onnx.load_from_string(content)
    onnx.checker.check_model(model)
    return len(model.graph.node)


READERS: dict[str, Callable[[bytes], object]] = {
    "applebplist": plistlib.loads,
    "appleplist": plistlib.loads,
    "bzip": bz2.decompress,
    "csv": lambda content: list(csv.DictReader(io.StringIO(content.decode()))),
    "docx": _zip_names,
    "eml": lambda content: message_from_bytes(content)["Subject"],
    "epub": _zip_names,
    "gzip": gzip.decompress,
    "ini": _ini_sections,
    "json": json.loads,
    "jsonl": lambda content: [json.loads(line) for line in content.splitlines()],
    "npy": lambda content: np.load(io.BytesIO(content)).shape,
    "onnx": _onnx_nodes,
    "pickle": pickle.loads,
    "png": _png_rows,
    "python": lambda content: compile(content, "sample", "exec", dont_inherit=True),
    "sqlite": _sqlite_tables,
    "svg": ET.fromstring,
    "tar": _tar_names,
    "toml": lambda content: tomllib.loads(content.decode()),
    "wav": _wav_frames,
    "xlsx": _zip_names,
    "xml": ET.fromstring,
    "xz": lzma.decompress,
    "yaml": yaml.safe_load,
    "zip": _zip_names,
    "zlibstream": zlib.decompress,
}


@pytest.mark.parametrize("label", READERS)
def test_sample_file_can_be_read_as_its_label(label: str) -> None:
    """A reader of the format accepts the files and finds something in them."""
    contents = [sample.content for sample in load_samples() if sample.label == label]
    assert len(contents) == 2
    for content in contents:
        found = READERS[label](content)
        assert found is not None
        assert found != []


def test_magika_classifies_every_sample_file() -> None:
    """The labels are magika's own names, and the files are realistic enough for it."""
    magika = pytest.importorskip("magika").Magika()
    for sample in load_samples():
        assert magika.identify_bytes(sample.content).prediction.dl.label == sample.label
