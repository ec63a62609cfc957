"""Signature of a large ONNX file, read in a child process.

    python -m headrace.models.signature_child PATH NICENESS PARENT_PID

Parsing and checking a file hold the interpreter lock, so that nothing else of the process runs
meanwhile: the event loop stood still for 11.7 of the 15.0 s that a file of 438 MB took on a busy
machine, in two pieces. The child takes the processor after what serves. It writes a
`SignatureReply` in JSON to stdout.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from headrace.errors import ConfigurationError, NotLoadableHere
from headrace.models.load_faults import is_fault_of_model, restore_fault
from headrace.models.signature import Signature, read_onnx_signature
from headrace.primitives.child_process import describe_exit, end_with_parent, start_child
from headrace.tuning import TUNING, ModelTuning


class SignatureReply(msgspec.Struct):
    """Result of the child process; `fault` says why there is no signature, and `is_of_model` what
    `headrace.models.load_faults.is_fault_of_model` says of that.
    """

    signature: Signature | None = None
    fault: str = ""
    is_of_model: bool = False


def read_large_signature(path: Path, tuning: ModelTuning = TUNING.models) -> Signature:
    """Read the signature of an ONNX file in a child process, if the file is large. Blocks.

    Args:
        path: of the file.
        tuning: what counts as large, and limits of the child.

    Raises:
        ConfigurationError: see `headrace.models.signature.read_onnx_signature`; or the child ended
            without a reply, or did not end.
    """
    if path.stat().st_size < tuning.read_apart_from_bytes:
        return read_onnx_signature(path)
    name, niceness = str(path.absolute()), tuning.reader_niceness
    with start_child(__name__, name, stdout=subprocess.PIPE, niceness=niceness) as child:
        try:
            output, _ = child.communicate(timeout=tuning.reader_timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            raise NotLoadableHere(
                f"{path}: expected it to be read within {tuning.reader_timeout_s:g} s, got no end"
            ) from None
    try:
        reply = msgspec.json.decode(output, type=SignatureReply)
    except msgspec.DecodeError:
        raise NotLoadableHere(
            f"{path}: expected the child process to read it, but it ended with "
            f"{describe_exit(child.returncode)}"
        ) from None
    if reply.signature is None:
        fault = reply.fault.replace(name, str(path))
        raise restore_fault(fault, is_of_model=reply.is_of_model)
    return reply.signature


def main(arguments: list[str]) -> None:
    """Read the file, and reply on stdout."""
    path, parent = arguments
    if not end_with_parent(int(parent)):
        return
    try:
        reply = SignatureReply(read_onnx_signature(Path(path)))
    except ConfigurationError as error:
        reply = SignatureReply(fault=str(error), is_of_model=is_fault_of_model(error))
    sys.stdout.buffer.write(msgspec.json.encode(reply))


if __name__ == "__main__":
    main(sys.argv[1:])
