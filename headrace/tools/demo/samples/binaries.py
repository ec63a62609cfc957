"""Sample files that are not text: archives, pictures, sound, databases, programs."""

from __future__ import annotations

import bz2
import gzip
import importlib.util
import io
import lzma
import marshal
import math
import pickle
import plistlib
import sqlite3
import struct
import tarfile
import wave
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import onnx

from headrace.tools.demo.samples.sources import python_files
from headrace.tools.demo.samples.words import Words

ZIP_TIME = (2024, 1, 1, 0, 0, 0)
MAX_PROGRAM_BYTES = 500_000


def _text(words: Words) -> bytes:
    return "\n".join(words.paragraph() for _ in range(words.number(10, 40))).encode()


def _archive(members: Mapping[str, bytes], stored: str = "") -> bytes:
    """Return a zip file; the member named `stored` is not compressed."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            entry = zipfile.ZipInfo(name, ZIP_TIME)
            entry.compress_type = zipfile.ZIP_STORED if name == stored else zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return target.getvalue()


def _zip(words: Words) -> bytes:
    return _archive({f"{noun}.txt": _text(words) for noun in words.nouns(words.number(2, 8))})


def _tar(words: Words) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for noun in words.nouns(words.number(2, 8)):
            content = _text(words)
            entry = tarfile.TarInfo(f"{words.noun()}/{noun}.txt")
            entry.size = len(content)
            entry.mtime = words.number(1_500_000_000, 1_700_000_000)
            archive.addfile(entry, io.BytesIO(content))
    return target.getvalue()


def _gzip(words: Words) -> bytes:
    return gzip.compress(_text(words), mtime=words.number(1_500_000_000, 1_700_000_000))


_OFFICE = "application/vnd.openxmlformats-officedocument"
_SCHEMAS = "http://schemas.openxmlformats.org"
_XML = '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n'


def _office(main_part: str, main_type: str, parts: Mapping[str, str]) -> bytes:
    """Return an Office Open XML package around its main part (ECMA-376, part 2)."""
    types = (
        f'{_XML}<Types xmlns="{_SCHEMAS}/package/2006/content-types">'
        '<Default Extension="rels" '
        'ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        '<Default Extension="xml" ContentType="application/xml"/>'
        f'<Override PartName="/{main_part}" ContentType="{_OFFICE}.{main_type}.main+xml"/>'
        "</Types>"
    )
    relations = (
        f'{_XML}<Relationships xmlns="{_SCHEMAS}/package/2006/relationships">'
        f'<Relationship Id="rId1" Type="{_SCHEMAS}/officeDocument/2006/relationships/'
        f'officeDocument" Target="{main_part}"/></Relationships>'
    )
    members = {"[Content_Types].xml": types, "_rels/.rels": relations, **parts}
    return _archive({name: part.encode() for name, part in members.items()})


def _docx(words: Words) -> bytes:
    body = "".join(
        f"<w:p><w:r><w:t>{words.paragraph()}</w:t></w:r></w:p>" for _ in range(words.number(5, 20))
    )
    document = (
        f'{_XML}<w:document xmlns:w="{_SCHEMAS}/wordprocessingml/2006/main">'
        f"<w:body>{body}</w:body></w:document>"
    )
    styles = f'{_XML}<w:styles xmlns:w="{_SCHEMAS}/wordprocessingml/2006/main"/>'
    return _office(
        "word/document.xml",
        "wordprocessingml.document",
        {"word/document.xml": document, "word/styles.xml": styles},
    )


def _xlsx(words: Words) -> bytes:
    rows = "".join(
        f'<row r="{row}"><c r="A{row}"><v>{words.number()}</v></c>'
        f'<c r="B{row}"><v>{words.amount()}</v></c></row>'
        for row in range(1, words.number(10, 60))
    )
    sheet = (
        f'{_XML}<worksheet xmlns="{_SCHEMAS}/spreadsheetml/2006/main">'
        f"<sheetData>{rows}</sheetData></worksheet>"
    )
    relationships = f"{_SCHEMAS}/officeDocument/2006/relationships"
    workbook = (
        f'{_XML}<workbook xmlns="{_SCHEMAS}/spreadsheetml/2006/main" xmlns:r="{relationships}">'
        f'<sheets><sheet name="{words.noun()}" sheetId="1" r:id="rId1"/></sheets></workbook>'
    )
    links = (
        f'{_XML}<Relationships xmlns="{_SCHEMAS}/package/2006/relationships"><Relationship '
        f'Id="rId1" Type="{relationships}/worksheet" Target="worksheets/sheet1.xml"/>'
        "</Relationships>"
    )
    return _office(
        "xl/workbook.xml",
        "spreadsheetml.sheet",
        {
            "xl/workbook.xml": workbook,
            "xl/_rels/workbook.xml.rels": links,
            "xl/worksheets/sheet1.xml": sheet,
        },
    )


def _epub(words: Words) -> bytes:
    container = (
        '<?xml version="1.0"?>\n<container version="1.0" '
        'xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles><rootfile '
        'full-path="OEBPS/content.opf" media-type="application/oebps-package+xml"/>'
        "</rootfiles></container>"
    )
    chapters = {
        f"OEBPS/chapter{number}.xhtml": f"<html><body><p>{words.paragraph()}</p></body></html>"
        for number in range(1, words.number(3, 9))
    }
    package = f"<package><metadata><title>{words.title()}</title></metadata></package>"
    members = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": container,
        "OEBPS/content.opf": package,
        **chapters,
    }
    encoded = {name: content.encode() for name, content in members.items()}
    return _archive(encoded, stored="mimetype")


def _wav(words: Words) -> bytes:
    rate = words.random.choice((8000, 16000, 22050, 44100))
    pitch = words.number(110, 880)
    tone = (
        int(12000 * math.sin(2 * math.pi * pitch * step / rate) + words.number(-300, 300))
        for step in range(words.number(2000, 8000))
    )
    target = io.BytesIO()
    with wave.open(target, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(rate)
        sound.writeframes(b"".join(struct.pack("<h", value) for value in tone))
    return target.getvalue()


def _picture(words: Words) -> tuple[int, int, bytes]:
    """Return width, height, and RGB rows of a colour gradient with noise."""
    width, height = words.number(24, 64), words.number(24, 64)
    tint = words.number(0, 255)
    pixels = bytearray()
    for y in range(height):
        for x in range(width):
            pixels += bytes((x * 4 % 256, y * 4 % 256, (tint + words.number(0, 20)) % 256))
    return width, height, bytes(pixels)


def _png(words: Words) -> bytes:
    """See the PNG specification, sections 5.3 (chunks) and 11.2.2 (IHDR)."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    width, height, pixels = _picture(words)
    stride = 3 * width
    rows = b"".join(b"\0" + pixels[at : at + stride] for at in range(0, len(pixels), stride))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def _bmp(words: Words) -> bytes:
    width, height, pixels = _picture(words)
    padding = b"\0" * (-3 * width % 4)
    stride = 3 * width
    rows = b"".join(pixels[at : at + stride] + padding for at in range(0, len(pixels), stride))
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, len(rows), 2835, 2835, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + len(rows), 0, 0, 54) + header + rows


def _sqlite(words: Words) -> bytes:
    database = sqlite3.connect(":memory:")
    try:
        for table in words.nouns(words.number(2, 5)):
            database.execute(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, name TEXT, size REAL)")
            rows = [(words.person(), words.amount()) for _ in range(words.number(5, 40))]
            statement = f"INSERT INTO {table} (name, size) VALUES (?, ?)"  # noqa: S608 - our words
            database.executemany(statement, rows)
        database.commit()
        return database.serialize()
    finally:
        database.close()


def _table(words: Words) -> dict[str, object]:
    return {
        noun: [words.person(), words.number(), words.amount(), {words.noun(): words.date()}]
        for noun in words.nouns(words.number(8, 30))
    }


def _pickle(words: Words) -> bytes:
    return pickle.dumps(_table(words), protocol=words.random.choice((2, 4, 5)))


def _binary_plist(words: Words) -> bytes:
    return plistlib.dumps(_table(words), fmt=plistlib.FMT_BINARY)


def _array(words: Words) -> npt.NDArray[np.floating]:
    shape = (words.number(10, 60), words.number(4, 20))
    generator = np.random.default_rng(words.number(0, 10**6))
    return generator.standard_normal(shape).astype(words.random.choice(("<f4", "<f8")))


def _npy(words: Words) -> bytes:
    target = io.BytesIO()
    np.save(target, _array(words))
    return target.getvalue()


def _pdf(words: Words) -> bytes:
    """Return one page of text, with its cross-reference table (ISO 32000-1, section 7.5)."""
    lines = " ".join(f"({words.title()}) Tj 0 -14 Td" for _ in range(words.number(10, 40)))
    page = f"BT /F1 11 Tf 60 780 Td {lines} ET".encode()
    objects = (
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents 4 0 R "
        b"/Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(page), page),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    )
    content = b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n"
    offsets = []
    for number, body in enumerate(objects, start=1):
        offsets.append(len(content))
        content += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    count = len(objects) + 1
    return content + (
        b"xref\n0 %d\n0000000000 65535 f \n%strailer\n<< /Size %d /Root 1 0 R >>\n"
        b"startxref\n%d\n%%%%EOF\n" % (count, table, count, len(content))
    )


def _onnx(words: Words) -> bytes:
    weights = _array(words).astype(np.float32)
    rows, columns = weights.shape
    name = words.noun()
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", [name, "weights"], ["result"])],
        words.noun(),
        [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", rows])],
        [onnx.helper.make_tensor_value_info("result", onnx.TensorProto.FLOAT, ["batch", columns])],
        [onnx.numpy_helper.from_array(weights, "weights")],
    )
    content: bytes = onnx.helper.make_model(graph).SerializeToString()
    return content


def _bytecode(words: Words) -> bytes:
    path = words.random.choice(python_files())
    code = compile(path.read_bytes(), path.name, "exec", dont_inherit=True)
    header = struct.pack("<III", 0, words.number(1_500_000_000, 1_700_000_000), 4096)
    return importlib.util.MAGIC_NUMBER + header + marshal.dumps(code)


@cache
def program_files() -> tuple[Path, ...]:
    """Return NumPy's extension modules, if they are ELF files on this platform."""
    modules = sorted(Path(np.__file__).parent.rglob("*.so"))
    return tuple(
        path
        for path in modules
        if path.stat().st_size <= MAX_PROGRAM_BYTES and path.read_bytes()[:4] == b"\x7fELF"
    )


def _elf(words: Words) -> bytes:
    return words.random.choice(program_files()).read_bytes()


def makers() -> dict[str, Callable[[Words], bytes]]:
    """Return the makers for this machine, by magika's name for the kind."""
    return dict(_MAKERS) | ({"elf": _elf} if program_files() else {})


_MAKERS: Mapping[str, Callable[[Words], bytes]] = MappingProxyType(
    {
        "applebplist": _binary_plist,
        "bmp": _bmp,
        "bzip": lambda words: bz2.compress(_text(words)),
        "docx": _docx,
        "epub": _epub,
        "gzip": _gzip,
        "npy": _npy,
        "onnx": _onnx,
        "pdf": _pdf,
        "pickle": _pickle,
        "png": _png,
        "pythonbytecode": _bytecode,
        "sqlite": _sqlite,
        "tar": _tar,
        "wav": _wav,
        "xlsx": _xlsx,
        "xz": lambda words: lzma.compress(_text(words)),
        "zip": _zip,
        "zlibstream": lambda words: zlib.compress(_text(words)),
    }
)
