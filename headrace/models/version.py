"""One version of a model, as the services use it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from headrace.errors import ConfigurationError
from headrace.models.answers import BoxAnswers, ClassAnswers, MaskAnswers
from headrace.models.backends.onnx_runtime import OnnxBackend
from headrace.models.backends.port import Backend
from headrace.models.backends.python import PythonBackend
from headrace.models.config import CPU, ModelConfig
from headrace.models.inputs.binding import Binder
from headrace.models.inputs.images import Images
from headrace.models.inputs.padding import add_padding
from headrace.models.inputs.records import Records
from headrace.models.inputs.transforms import TransformSource, make_transform
from headrace.models.packing.signatures import Trust
from headrace.models.postprocess import Postprocess, PostprocessSource, plan_returned
from headrace.models.processing import read_output_labels
from headrace.models.profiling.batch_safety import Batching, Verdict
from headrace.models.profiling.latency import Latency
from headrace.models.repository import FoundModel, FoundVersion, read_signature, stamp_files
from headrace.models.schema_registry import SchemaRegistry
from headrace.models.signature import Signature, without_batching
from headrace.protocol.headers import JSON, is_payload, tensor_types
from headrace.protocol.messages import Envelope
from headrace.protocol.negotiation import require_content_type
from headrace.tuning import TUNING, ModelTuning


class State(StrEnum):
    """State of a version. A request is given to one that is ready, or waits for one that was
    unloaded while it was idle.
    """

    LOADING = "loading"
    READY = "ready"
    UNLOADED = "unloaded"
    FAILED = "failed"
    UNLOADING = "unloading"


class ModelVersion:
    """One version of a model: its signature, its limits, its state.

    Only the registry changes the state.

    Args:
        model: the model on disk, with its configuration.
        found: the version on disk.
        tuning: for this version and its backends.
        registry: has the schemas of its records, if they are framed.

    Attributes:
        config: configuration of the model.
        signature: signature of this version.
        labels: of the classes of an output, by output; see `output_labels` of the configuration.
        source: what another process makes the same version of. Its signature has been checked,
            so that no keys are needed.
        bind: checks a request, see `headrace.models.inputs.binding.Binder.bind`.
        transform: makes inputs from a raw payload, see `headrace.models.inputs.transforms`.
        transform_source: what another process makes the same transform of.
        records: the transform, if it is one of records.
        postprocess: user code that outputs pass before answers to payloads are made of them; None
            if there is none.
        postprocess_source: what another process makes the same postprocess of.
        answers: writes the answers to payloads; None if they have tensors.
        max_batch_size: in rows; 1 if batching is off, for the reason `batching_off`.
        verdict: whether its requests may share runs; None if that was not tested.
        contradiction: between `model.toml` and the verdict; empty otherwise.
        latency: how long its runs take, as observed by this process.
        reason: why it is not ready, or is ready but replaced; empty otherwise.
        has_failed_elsewhere: it is loading here, but executors of other processes cannot load it.
        is_rejected: it has failed, here or elsewhere, because of its files or its configuration.
        load_s: how long loading took, from its start until the version was ready; None before that,
            and in a process without an executor.
        loaded_stamp: of the files that the executor has loaded last, when it began to; empty before
            that.
        last_used_us: steady time at which its last run ended, or it became ready.
        memory_bytes: what each of its instances has taken while it was loaded, by device (`host`,
            `cuda:0`); without what could not be measured.
        warm_up_omitted: why it was not warmed up, and how to fix that; empty otherwise.

    Raises:
        ConfigurationError: the version cannot be served; the message says why.
    """

    def __init__(
        self,
        model: FoundModel,
        found: FoundVersion,
        tuning: ModelTuning = TUNING.models,
        registry: SchemaRegistry | None = None,
    ) -> None:
        assert model.config is not None
        self.tuning = tuning
        self.name = model.name
        self.version = found.version
        self.directory: Path = found.directory
        self.source = (model._replace(versions=()), found._replace(trust=Trust()))
        self.config: ModelConfig = model.config
        self._found = found
        self.signature, self._read_stamp = self._read_signature()
        answered = plan_returned(self.signature, self.config.python)
        # Labels may be of an output of the model as well as of one that its postprocess returns.
        labelled = {each.name: each for each in (*self.signature.outputs, *answered.outputs)}
        self.labels = read_output_labels(
            self.directory,
            self.config.output_labels,
            self.signature._replace(outputs=tuple(labelled.values())),
        )
        self.bind = self._binder().bind
        # Only records are answered by their transform.
        converted = self.signature if self.config.record is None else answered
        self.transform = make_transform(
            model.directory, model.config, converted, self.directory, registry
        )
        self.transform_source = TransformSource(
            model.directory, model.config, converted, self.directory
        )
        self.postprocess: Postprocess | None = None
        self.postprocess_source = PostprocessSource(
            model.directory, answered, model.config.max_load_s
        )
        if self.config.python is not None:
            self.postprocess = self.postprocess_source.make()
        self.answers: ClassAnswers | BoxAnswers | MaskAnswers | None = None
        table = model.config.answer
        if table is not None and table.classes is not None:
            self.answers = ClassAnswers(table.classes, answered, self.labels)
        elif table is not None and table.boxes is not None:
            assert isinstance(self.transform, Images)
            self.answers = BoxAnswers(table.boxes, answered, self.labels, self.transform)
        elif table is not None and table.mask is not None:
            assert isinstance(self.transform, Images)
            self.answers = MaskAnswers(table.mask, answered, self.transform)
        self.records = self.transform if isinstance(self.transform, Records) else None
        self.max_batch_size = model.config.max_batch_size
        self.max_batch_bytes = model.config.max_batch_bytes
        self.max_queue_delay_ms = model.config.max_queue_delay_ms
        self.latency = Latency(tuning)
        self.batching_off = ""
        self.contradiction = ""
        self.verdict: Verdict | None = None
        self.state = State.LOADING
        self.reason = ""
        self.has_failed_elsewhere = self.is_rejected = False
        self.load_s: float | None = None
        self.loaded_stamp = ""
        self.last_used_us = 0
        self.memory_bytes: dict[str, list[int]] = {}
        self.warm_up_omitted = ""
        if self.max_batch_size == 1:
            self.batching_off = "max_batch_size is 1"
        elif not self.signature.batched:
            self.apply_verdict(Verdict(Batching.NOT_BATCHABLE, self.signature.unbatched_reason))

    def check_again(self) -> None:
        """Check the files again if they have changed since they were read. Blocks.

        Raises:
            ConfigurationError: they are not those of the manifest or the checksum, or have other
                inputs or outputs.
        """
        if stamp_files(self.directory) == self._read_stamp:
            return
        (inputs, outputs, *_), stamp = self._read_signature()
        if (inputs, outputs) != (self.signature.inputs, self.signature.outputs):
            raise ConfigurationError(
                f"{self.directory}: expected the inputs and outputs that it had when it was read; "
                "its files were changed, and have to be read anew"
            )
        self._read_stamp = stamp

    def _read_signature(self) -> tuple[Signature, str]:
        """Check the files; return the signature, and the stamp of the files that it is of."""
        found, config = self._found, self.config
        stamp = "" if found.fault else stamp_files(found.directory)
        signature = read_signature(found, config, tuning=self.tuning)
        return add_padding(signature, config), stamp

    def _binder(self) -> Binder:
        config = self.config
        return Binder(self.signature, config.range, finite=config.finite_inputs, tuning=self.tuning)

    def __repr__(self) -> str:
        return f"<ModelVersion {self.name}/{self.version} {self.state}>"

    @property
    def stamp(self) -> str:
        """Changes when a file of the version changes."""
        return self._found.stamp

    @property
    def rewrites_answers(self) -> bool:
        """True if payloads get other answers than the outputs as tensors."""
        return (
            self.answers is not None
            or self.postprocess is not None
            or (self.records is not None and self.records.pass_through)
        )

    @property
    def answers_with_payload(self) -> bool:
        """True if answers to payloads are made of these as well."""
        if self.postprocess is None and isinstance(self.answers, ClassAnswers):
            return False
        return self.rewrites_answers

    def takes_payload(self, envelope: Envelope) -> bool:
        """Return whether the value of a request is a payload, and no tensors."""
        is_tensors = envelope.content_type == JSON and not self.config.takes_json
        return is_payload(envelope) and not is_tensors

    def whole_types(self, envelope: Envelope) -> tuple[str, ...]:
        """Return the content types, other than those of tensors, in which a request can be
        answered; none for a request with tensors.
        """
        if not self.takes_payload(envelope):
            return ()
        if self.config.python is not None and self.config.python.content_types:
            return self.config.python.content_types
        if self.answers is not None:
            return (self.answers.content_type,)
        if self.records is not None and self.records.pass_through:
            return (envelope.content_type,)
        return ()

    def choose_whole_type(self, envelope: Envelope) -> str:
        """Return which of the `whole_types` is the answer's, as the caller accepts them; empty if
        the answer has tensors. What is no tensors is preferred.

        Raises:
            Rejected: `INVALID_REQUEST`: the caller accepts nothing that the version can answer.
        """
        whole = self.whole_types(envelope)
        if not envelope.accept:
            return whole[0] if whole else ""
        offers = (*whole, *tensor_types(envelope.content_type))
        chosen = require_content_type(envelope.accept, offers)
        return chosen if chosen in whole else ""

    @property
    def depends_on_values(self) -> bool:
        """True if `bind` depends on the values of inputs, not only on their shapes."""
        return bool(self.config.range) or self.config.finite_inputs

    @property
    def is_servable(self) -> bool:
        """True if its requests are run, perhaps once it is loaded again."""
        return self.state in (State.READY, State.UNLOADED)

    @property
    def may_inline(self) -> bool:
        """True if any thread may run its backends, so that short runs can stay on the event loop.

        That holds for ONNX Runtime sessions on the CPU. A user's class may not allow it, CUDA
        graphs belong to the thread that captured them, and pinned instances stay on their threads'
        cores.
        """
        config = self.config
        on_the_cpu = config.backend == "onnx" and config.execution_providers == (CPU,)
        return on_the_cpu and not config.pinned

    @property
    def is_undecided(self) -> bool:
        """True while requests decide on batching: they run alone, some of them also together."""
        verdict = self.verdict
        undecided = verdict is not None and verdict.batching is Batching.UNDECIDED
        return undecided and bool(self.batching_off)

    def apply_verdict(self, verdict: Verdict) -> None:
        """Allow or forbid shared runs according to a verdict.

        A declaration in `model.toml` overrides the verdict, and the contradiction is recorded;
        except if dimension 0 is not the batch at all.
        """
        self.verdict, self.contradiction = verdict, ""
        declared = self.config.max_batch_size
        if verdict.has_no_batch and self.signature.batched:
            self.signature = without_batching(self.signature, verdict.reason)
            self.bind = self._binder().bind
        if declared == 1:
            self.max_batch_size, self.batching_off = 1, "max_batch_size is 1"
        elif verdict.batching is Batching.BATCHABLE:
            self.max_batch_size, self.batching_off = declared, ""
        elif self.config.declares("max_batch_size") and self.signature.batched:
            if verdict.batching is Batching.NOT_BATCHABLE:
                self.contradiction = (
                    f"max_batch_size is declared as {declared}; {verdict.description}"
                )
        elif verdict.batching is Batching.UNDECIDED:
            self.max_batch_size = min(declared, self.tuning.undecided_rows)
            self.batching_off = verdict.description
        else:
            self.max_batch_size, self.batching_off = 1, verdict.reason

    def new_backend(self, signature: Signature | None = None) -> Backend:
        """Return an unloaded instance with the version's signature, or with a corrected one."""
        backend = PythonBackend if self.config.backend == "python" else OnnxBackend
        return backend(self.directory, self.config, signature or self.signature, self.tuning)
