"""Sample payloads of a version, answered as requests are."""

from __future__ import annotations

from contextlib import closing, nullcontext

from prometheus_client import CollectorRegistry

from headrace.cli.payloads import bind_payload, guess_content_type
from headrace.config import Settings
from headrace.errors import Code, HeadraceError, Rejected, describe_error
from headrace.models.version import ModelVersion
from headrace.protocol.ack import NULL_ACK
from headrace.protocol.headers import NO_HEADERS
from headrace.protocol.messages import Request
from headrace.services.executor.answer_rewriting import rewrite_answers
from headrace.services.executor.buffers import scatter
from headrace.services.executor.instance import Instance
from headrace.services.executor.postprocessing import PostprocessOptions, Postprocessor
from headrace.telemetry.metrics import Metrics

SAMPLES = "samples"
"""Directory of a version's sample payloads, which `headrace models check` reads."""


async def check_samples(
    version: ModelVersion, instance: Instance, settings: Settings
) -> tuple[int, str]:
    """Return how many sample payloads of a version are accepted, and what is wrong with one that
    is not; empty if all are.

    A payload must become inputs. If the version makes other answers to payloads than its outputs
    (`[answer]`, `pass_through`), the model is run, and its answer must be made as well.

    Args:
        version: its verdict has been applied.
        instance: of the version, loaded.
        settings: bound what user code may take.
    """
    postprocessor = _make_postprocessor(version, settings)
    paths = sorted(each for each in (version.directory / SAMPLES).glob("[!.]*") if each.is_file())
    with closing(postprocessor) if postprocessor is not None else nullcontext():
        for count, path in enumerate(paths):
            try:
                payload = path.read_bytes()
                content_type = guess_content_type(path.name, payload)
                await _answer(payload, content_type, version, instance, postprocessor)
            except Exception as error:  # noqa: BLE001 - a model may raise anything
                text = str(error) if isinstance(error, HeadraceError) else describe_error(error)
                return count, f"{SAMPLES}/{path.name}: {text}"
    return len(paths), ""


async def _answer(
    payload: bytes,
    content_type: str,
    version: ModelVersion,
    instance: Instance,
    postprocessor: Postprocessor | None,
) -> None:
    """Make the answer to a payload, if it is another one than the outputs. Raises `Rejected`."""
    bound = await bind_payload(version, payload, content_type)
    if not version.rewrites_answers:
        return
    envelope = NO_HEADERS._replace(content_type=content_type, model=version.name)
    request = Request(NULL_ACK, 0, 0, -1, 0, None, payload, (), envelope)
    request.inputs, request.rows, request.shape_class, request.size_bytes, request.wanted = bound
    scatter([request], version.signature, await instance.run(instance.gather([request])))
    await rewrite_answers([request], version, postprocessor)
    if request.failure is not None:
        raise Rejected(Code(request.failure.code), request.failure.message)


def _make_postprocessor(version: ModelVersion, settings: Settings) -> Postprocessor | None:
    if version.postprocess is None:
        return None
    options = PostprocessOptions(
        settings.delivery.max_attempts, settings.limits.max_in_flight_bytes
    )
    return Postprocessor(version, options, Metrics(CollectorRegistry()))
