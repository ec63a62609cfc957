"""Settings of one model: `<repository>/<model>/model.toml`, in which every line is optional."""

from __future__ import annotations

import difflib
import math
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from headrace.config import (
    ALL_CORES,
    NOT_BOOL,
    BatchBytes,
    Device,
    DeviceBytes,
    Instances,
    QueueDelayMs,
    Real,
    Rows,
    Settings,
    Threads,
    describe_fault,
)
from headrace.errors import ConfigurationError
from headrace.models.media_config import (
    ImageTransform,
    SoundTransform,
    TokensTransform,
    as_tuple,
)
from headrace.models.signature import TensorSpec
from headrace.protocol.messages import MAX_OUTPUTS, MAX_RANK
from headrace.protocol.tensors import DATATYPES

OWN_FILE = "model.toml"
_TRITON_FILE = "config.pbtxt"
CONFIG_FILES = (OWN_FILE, _TRITON_FILE)
"""Names of the file with a model's configuration; the first that is there counts."""
CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
Provider = Literal["CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"]
_UNION_PART = re.compile(r"[\[\],()]|^(int|float|str|bool|constrained-\w+)$")
_LARGEST_FP32 = 3.4028234663852886e38
_Versions = Annotated[
    tuple[Annotated[int, Field(ge=1, le=10**18 - 1), NOT_BOOL], ...], Field(min_length=1)
]
_Latest = Annotated[str, Field(pattern=r"^latest:[1-9]\d{0,3}$")]
_Value = (
    Annotated[int, Field(ge=-(2**63), le=2**64 - 1), NOT_BOOL]
    | Annotated[Real, Field(ge=-sys.float_info.max, le=sys.float_info.max), NOT_BOOL]
)
"""Value of any datatype. Integers stay integers: FP64 cannot represent all 64-bit integers."""
_Seconds = Annotated[Real, Field(gt=0, le=24 * 3600), NOT_BOOL]
_NONE: Mapping[str, Any] = MappingProxyType({})
MAX_THREADS = 1024
"""Upper limit of threads over all instances of a version, if `intra_op_threads` is set."""


class _Group(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class DeclaredTensor(_Group):
    """An input or output of a model; -1 stands for a free dimension. Those of an ONNX file must
    agree.
    """

    name: Annotated[str, Field(min_length=1)]
    datatype: str
    shape: Annotated[
        tuple[Annotated[int, Field(ge=-1, le=2**31 - 1), NOT_BOOL], ...], Field(max_length=MAX_RANK)
    ]

    @model_validator(mode="after")
    def _datatype_is_known(self) -> Self:
        if self.datatype not in DATATYPES:
            raise ValueError(
                f"datatype: expected one of {', '.join(DATATYPES)}, got {self.datatype}"
            )
        return self

    def spec(self) -> TensorSpec:
        """Return this tensor as a part of a signature."""
        return TensorSpec(self.name, self.datatype, self.shape)


_Factors = Annotated[
    tuple[Annotated[Real, Field(ge=-_LARGEST_FP32, le=_LARGEST_FP32), NOT_BOOL], ...],
    Field(min_length=1),
    BeforeValidator(as_tuple),
]
_ImageLayout = Literal["NCHW", "NHWC"]
_Step = Annotated[str, Field(pattern=r"^(softmax|argmax|top_k:[1-9]\d{0,5})$")]


class Preprocess(_Group):
    """Request-side form of one input, and its conversion to the model's: x scale + offset."""

    datatype: Literal["UINT8", "FP16", "BF16", "FP32"]
    layout: _ImageLayout | None = None
    """Layout in requests; None if the model's input has no channels."""
    model_layout: _ImageLayout | None = None
    """Layout of the model's input; by default that of the requests."""
    scale: _Factors = (1.0,)
    """One value, or one per channel."""
    offset: _Factors = (0.0,)

    @model_validator(mode="before")
    @classmethod
    def _model_has_the_layout_of_requests(cls, values: Any) -> Any:
        if isinstance(values, dict) and "layout" in values:
            return {"model_layout": values["layout"]} | values
        return values

    @model_validator(mode="after")
    def _layouts_go_together(self) -> Self:
        if self.model_layout and not self.layout:
            raise ValueError("model_layout: expected layout beside it")
        return self


class RecordColumn(_Group):
    """A field of a record, and how it becomes a column of an input."""

    path: Annotated[str, Field(min_length=1)]
    """Names of fields from the outside in, and numbers of list elements, with dots between."""
    default: _Value | bool | str | None = None
    """Value of a field that is missing or null; without it such a record is refused."""
    vocabulary: str | tuple[str, ...] = ()
    """Strings whose places become the numbers, or the file with one string a line."""
    unknown: Annotated[int, Field(ge=-(2**63), le=2**63 - 1), NOT_BOOL] | None = None
    """Number of strings that are not in the vocabulary; without it they are refused."""
    date: Literal["seconds", "days", "year", "month", "day", "weekday", "hour"] | None = None
    """Number that is made of a date in ISO 8601, in UTC."""
    mean: Annotated[Real, Field(ge=-_LARGEST_FP32, le=_LARGEST_FP32), NOT_BOOL] = 0.0
    deviation: Annotated[Real, Field(gt=0, le=_LARGEST_FP32), NOT_BOOL] = 1.0

    @property
    def parts(self) -> tuple[str, ...]:
        """The names in the path."""
        return tuple(self.path.split("."))

    @model_validator(mode="after")
    def _values_agree(self) -> Self:
        if self.unknown is not None and not self.vocabulary:
            raise ValueError("unknown: expected vocabulary beside it")
        if self.vocabulary and self.date:
            raise ValueError("vocabulary, date: expected only one of them")
        return self


class RecordTransform(_Group):
    """Conversion of records in JSON, CSV, Avro or Protobuf to inputs."""

    format: Literal["json", "csv", "avro", "avro_container", "protobuf"] | None = None
    """Format of all payloads; by default their content types say it."""
    columns: tuple[str, ...] = ()
    """Names of the fields of CSV lines; by default the first line has them."""
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","
    avro_schema: str = ""
    """File with the Avro schema, in the version's directory or beside `model.toml`."""
    protobuf_descriptors: str = ""
    """File in the version's directory with the descriptors that protoc writes."""
    protobuf_message: str = ""
    """Full name of the message of payloads."""
    protobuf_answer: str = ""
    """Full name of the message of answers, which has the outputs as fields."""
    framing: Literal["confluent"] | None = None
    """Payloads begin with the id of their schema in the registry of the settings."""
    subject: str = ""
    """Subject in the registry under which the schemas of answers are."""
    pass_through: bool = False
    """Answer with the records, with the outputs as further fields."""
    max_rows: Annotated[int, Field(ge=1, le=1_000_000), NOT_BOOL] = 10_000
    """Most records of a payload."""
    inputs: dict[str, Annotated[tuple[RecordColumn, ...], Field(min_length=1)]]
    """Columns of each input of the model."""

    @model_validator(mode="after")
    def _csv_can_be_read(self) -> Self:
        names = self.columns
        if "" in names or len(set(names)) < len(names):
            shown = ", ".join(map(repr, names))
            raise ValueError(f"columns: expected distinct names, none of them empty, got {shown}")
        if self.delimiter in '"\r\n':
            raise ValueError(
                f"delimiter: expected neither a quotation mark nor a line end, "
                f"got {self.delimiter!r}"
            )
        missing = [
            each.path
            for columns in self.inputs.values()
            for each in columns
            if each.default is None and each.path not in names
        ]
        if self.format == "csv" and names and missing:
            raise ValueError(
                f"inputs: expected each path among columns, {', '.join(names)}, or with a default "
                f"beside it, got {missing[0]}"
            )
        return self

    @model_validator(mode="after")
    def _protobuf_is_complete(self) -> Self:
        if bool(self.protobuf_descriptors) != bool(self.protobuf_message):
            raise ValueError("protobuf_descriptors, protobuf_message: expected both, or none")
        if self.format == "protobuf" and not self.protobuf_message:
            raise ValueError("format: expected protobuf_descriptors beside protobuf")
        needs_answer = bool(self.protobuf_message) and self.pass_through
        if needs_answer != bool(self.protobuf_answer):
            raise ValueError(
                "protobuf_answer: expected it with protobuf_message and pass_through alone"
            )
        return self

    @model_validator(mode="after")
    def _framing_is_complete(self) -> Self:
        if self.framing is not None and (self.format is not None or self.avro_schema):
            raise ValueError("framing: expected neither format nor avro_schema beside it")
        if self.framing is not None and self.pass_through and not self.subject:
            raise ValueError("framing: expected subject beside it and pass_through")
        if self.subject and not (self.framing is not None and self.pass_through):
            raise ValueError("subject: expected framing and pass_through beside it")
        return self


class TransformTable(_Group):
    """A transform with settings: one of these."""

    record: RecordTransform | None = None
    image: ImageTransform | None = None
    tokens: TokensTransform | None = None
    sound: SoundTransform | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if len(self.model_fields_set) != 1:
            names = " or ".join(f"transform.{name}" for name in type(self).model_fields)
            raise ValueError(f"expected one of {names}")
        return self


class ClassesAnswer(_Group):
    """Classes with the largest values, as JSON objects."""

    output: str = ""
    """Output with the values; empty: the only one. Its labels are in `output_labels`."""
    top: Annotated[int, Field(ge=1, le=1000), NOT_BOOL] = 5
    """Most classes of a row."""


class BoxesAnswer(_Group):
    """Objects in images: boxes without those that overlap, in pixels of the image that was sent."""

    boxes: str = "boxes"
    """Output with the boxes in pixels of the input, [batch, boxes, 4]."""
    scores: str = "scores"
    """Output with the scores, [batch, boxes, classes]. Its labels are in `output_labels`."""
    format: Literal["xyxy", "cxcywh"] = "xyxy"
    """Numbers of a box: its corners, or its middle, width and height."""
    min_score: Annotated[Real, Field(ge=-_LARGEST_FP32, le=_LARGEST_FP32), NOT_BOOL] = 0.25
    """Boxes with lower scores are left out."""
    max_overlap: Annotated[Real, Field(ge=0, le=1), NOT_BOOL] = 0.45
    """Largest overlap (intersection over union) of boxes of one class; of others the best stays."""
    max_candidates: Annotated[int, Field(ge=1, le=20_000), NOT_BOOL] = 5000
    """Most boxes of an image that are compared, the best ones."""
    top: Annotated[int, Field(ge=1, le=1000), NOT_BOOL] = 100
    """Most boxes of an image in the answer."""


class MaskAnswer(_Group):
    """Class of each pixel of an image, as a PNG of the size of the image that was sent."""

    output: str = ""
    """Output with the classes of pixels as integers, [batch, height, width] or [batch, 1, height,
    width], or with their scores, [batch, classes, height, width]; empty: the only one.
    """
    outside: Annotated[int, Field(ge=0, le=255), NOT_BOOL] = 255
    """Class of pixels that were cropped, and so not seen by the model."""


_ContentType = Annotated[str, Field(pattern=r"^[a-z0-9.+_-]+/[a-z0-9.+_-]+$", max_length=128)]


class PythonAnswer(_Group):
    """A user's function behind the model, in `postprocess.py` beside `model.toml`."""

    outputs: Annotated[tuple[DeclaredTensor, ...], Field(max_length=MAX_OUTPUTS)] = ()
    """Arrays that it returns; by default those of the model."""
    content_types: Annotated[tuple[_ContentType, ...], Field(max_length=16)] = ()
    """Content types of the answers that it returns itself; empty: it returns arrays."""
    isolation: Literal["thread", "process"] = "thread"
    """Where it runs: on a thread, or in a child process of each instance."""

    @model_validator(mode="after")
    def _returns_one_kind(self) -> Self:
        if self.outputs and self.content_types:
            raise ValueError("expected one of outputs and content_types")
        return self


class AnswerTable(_Group):
    """Form of the answers to payloads: one of the forms, a user's function, or this before one."""

    python: PythonAnswer | None = None
    classes: ClassesAnswer | None = None
    boxes: BoxesAnswer | None = None
    mask: MaskAnswer | None = None

    @property
    def forms(self) -> set[str]:
        """The forms that are set, without the user's function."""
        return self.model_fields_set - {"python"}

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if len(self.forms) > 1 or not self.model_fields_set:
            raise ValueError(
                "expected one of answer.classes, answer.boxes or answer.mask, or answer.python"
            )
        if self.forms and self.returns_answers:
            raise ValueError(
                f"answer.{min(self.forms)}: expected no answer.python.content_types beside it, "
                "whose answers are made by the function itself"
            )
        return self

    @property
    def returns_answers(self) -> bool:
        """True if a user's function returns the answers themselves."""
        return self.python is not None and bool(self.python.content_types)


def _transform_form(value: object) -> str:
    # In brackets, so that the faults of the configuration do not name it.
    return "[table]" if isinstance(value, dict | TransformTable) else "[name]"


_Transform = Annotated[
    Annotated[Literal["python", "text", "octets"] | None, Tag("[name]")]
    | Annotated[TransformTable, Tag("[table]")],
    Discriminator(_transform_form),
]


class ModelConfig(_Group):
    """Serving configuration of one model. Keys missing in `model.toml` come from the settings."""

    backend: Literal["onnx", "python"] = "onnx"
    versions: Literal["latest", "all"] | _Latest | _Versions = "latest"
    """`latest:3` selects the three highest."""
    max_batch_size: Rows = 32
    """Limit in rows; 1 turns batching off."""
    max_queue_delay_ms: QueueDelayMs = 0.0
    max_batch_bytes: BatchBytes = 8 * 1024 * 1024
    batch_tolerance: Literal["auto"] | Annotated[Real, Field(gt=0, le=100), NOT_BOOL] = "auto"
    """Allowed difference of batched from unbatched answers, relative to the output's scale."""
    probe: bool = True
    """Probe the model at load: whether rows may share a run, and how long runs take."""
    device: Device = "cpu"
    instances: Instances = 1
    intra_op_threads: Threads = 0
    """Threads per run; 0 divides the process's cores (`executor.cores`) among the instances."""
    pinned: bool = False
    """Pin the threads of each instance to its own cores; CPU only."""
    io_binding: bool = True
    """Bind inputs and outputs by address where possible; false always uses the plain path."""
    experimental_cuda: bool = False
    """Allow `cuda:N`, which is experimental: it has not been under load for hours."""
    ring: bool = False
    """Send batches through the ring, if the shapes are fixed."""
    cuda_graphs: bool = False
    """Capture one CUDA graph per row bucket; only with `ring`."""
    gpu_memory_limit_bytes: DeviceBytes = 0
    """Limit of ONNX Runtime's arena on a GPU; 0 means no limit."""
    providers: tuple[Provider, ...] = ()
    """ONNX Runtime's execution providers, first choice first; empty: chosen by `device`."""
    provider_options: dict[Provider, dict[str, str | int | float | bool]] = {}
    extensions: bool = False
    """Register the operators of onnxruntime-extensions, such as tokenizers inside the graph."""
    range: dict[str, tuple[_Value, _Value]] = {}
    """Lowest and highest allowed value, by input name."""
    finite_inputs: bool = False
    """Refuse requests that contain NaN or an infinity."""
    finite_outputs: bool = False
    """Fail requests whose output rows contain NaN or an infinity."""
    sequence_buckets: tuple[Annotated[int, Field(ge=1, le=2**24), NOT_BOOL], ...] = ()
    """Lengths that requests are padded to, for models with a mask."""
    pad: dict[str, _Value] = {}
    """Padding value, by input name."""
    mask: str = ""
    """Input that masks the padding; it is padded with 0 itself."""
    max_execution_s: _Seconds = 30.0
    """Time limit of a run, after which it counts as hung."""
    max_load_s: _Seconds = 600.0
    """Time limit for loading and warming up, after which the version has failed."""
    swap: Literal["beside", "unload_first"] = "beside"
    """Whether a new version is loaded beside the one that it replaces, or that one is unloaded
    first; requests wait meanwhile.
    """
    unload_idle: Literal["never", "wait", "refuse"] = "never"
    """Whether a version may be unloaded while it is idle, where `models.memory_bytes` leaves too
    little for another one; and whether the requests that come then wait until it is loaded again,
    or are refused.
    """
    allow_breaking_versions: bool = False
    """Serve a version even if its signature breaks callers of the version in service."""
    checksum: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")] | None = None
    """Checksum of the version's files, see `headrace.models.repository.compute_checksum`."""
    transform: _Transform = None
    """Transform that makes inputs from a payload that is neither MessagePack nor JSON."""
    preprocess: dict[str, Preprocess] = {}
    """Preprocessing, by input name."""
    postprocess: Annotated[tuple[_Step, ...], BeforeValidator(as_tuple)] = ()
    """Steps appended to the graph: softmax, argmax or top_k:N."""
    postprocess_output: str = ""
    """Output that the steps are applied to; empty: the only one."""
    labels: str = ""
    """File with one label per class, in the version's directory or beside this file."""
    output_labels: dict[str, str] = {}
    """Such files by output, for callers that ask a gateway for the top classes of an output."""
    answer: AnswerTable | None = None
    """Form of the answers to payloads; by default they have the outputs as tensors."""
    inputs: tuple[DeclaredTensor, ...] = ()
    outputs: tuple[DeclaredTensor, ...] = ()
    _declared: frozenset[str] = frozenset()
    _cores: str = ALL_CORES

    @model_validator(mode="after")
    def _values_agree(self) -> Self:
        if faults := [
            *self._range_faults(),
            *self._device_faults(),
            *self._thread_faults(),
            *self._ring_faults(),
            *self._signature_faults(),
            *self._adaptation_faults(),
            *self._padding_faults(),
        ]:
            raise ValueError("; ".join(faults))
        return self

    def _range_faults(self) -> list[str]:
        return [
            f"range.{name}: expected [lowest, highest], got [{low}, {high}]"
            for name, (low, high) in self.range.items()
            if not low <= high
        ]

    def _device_faults(self) -> list[str]:
        on_cuda = self.device != "cpu"
        faults = []
        if on_cuda and not self.experimental_cuda:
            faults.append(
                f"device {self.device}: expected experimental_cuda = true beside it, here or in "
                "[executor], since the code for GPUs is experimental; got false"
            )
        faults += [
            f"provider_options.{name}: expected one of the providers in use, "
            f"{', '.join(self.execution_providers)}"
            for name in self.provider_options
            if name not in self.execution_providers
        ]
        faults += [
            f"provider_options.{name}.{key}: expected a finite number, got {value}"
            for name, options in self.provider_options.items()
            for key, value in options.items()
            if isinstance(value, float) and not math.isfinite(value)
        ]
        if on_cuda and self.instances > 1:
            faults.append(
                f"instances: expected 1 on {self.device}, where several contend for the driver, "
                f"got {self.instances}"
            )
        if on_cuda and self.pinned:
            faults.append(f"pinned: expected device cpu, got {self.device}")
        if self.providers and on_cuda != (self.providers[0] != CPU):
            faults.append(f"providers: {self.providers[0]} first does not fit device {self.device}")
        return faults

    def _thread_faults(self) -> list[str]:
        threads = self.instances * self.intra_op_threads
        if threads <= MAX_THREADS:
            return []
        return [f"instances: expected at most {MAX_THREADS} threads in all of them, got {threads}"]

    def _ring_faults(self) -> list[str]:
        """Refuse requested features that would not be available; never drop them silently."""
        first, on_cuda = self.execution_providers[0], self.device != "cpu"
        faults = []
        if self.ring and first not in (CPU, CUDA):
            faults.append(f"ring: expected false with {first}, whose runs go by no stream of ours")
        if self.cuda_graphs and on_cuda and not (self.ring and self.execution_providers == (CUDA,)):
            faults.append(
                f"cuda_graphs: expected ring = true and {CUDA} alone beside it, got ring = "
                f"{str(self.ring).lower()} and {', '.join(self.execution_providers)}"
            )
        return faults

    def _signature_faults(self) -> list[str]:
        if self.backend == "python" and bool(self.inputs) != bool(self.outputs):
            return ["inputs, outputs: expected both or neither"]
        return []

    def _adaptation_faults(self) -> list[str]:
        faults = []
        if self.backend == "python" and (self.preprocess or self.postprocess):
            faults.append("preprocess, postprocess: expected only with backend = onnx")
        if self.backend == "python" and self.extensions:
            faults.append("extensions: expected only with backend = onnx")
        if self.backend == "python" and self.decoded:
            faults.append("transform.tokens.decode: expected only with backend = onnx")
        if self.answer is not None and self.transform is None:
            faults.append("answer: expected transform beside it, as only payloads are so answered")
        image = self.transform.image if isinstance(self.transform, TransformTable) else None
        if self.answer is not None and self.answer.boxes is not None and image is None:
            faults.append("answer.boxes: expected transform.image beside it")
        one_image = image is not None and image.max_images == 1
        if self.answer is not None and self.answer.mask is not None and not one_image:
            faults.append(
                "answer.mask: expected transform.image with max_images = 1 beside it, as an answer "
                "has one mask"
            )
        if (
            self.answer is not None
            and (self.answer.forms or self.answer.returns_answers)
            and self.record is not None
            and self.record.pass_through
        ):
            faults.append("answer: expected no transform.record.pass_through beside it")
        if any(step != "softmax" for step in self.postprocess[:-1]):
            faults.append(
                f"postprocess: expected only softmax before the last, got "
                f"{', '.join(self.postprocess)}"
            )
        if not self.postprocess and (self.labels or self.postprocess_output):
            faults.append("labels, postprocess_output: expected postprocess beside them")
        return faults

    def _padding_faults(self) -> list[str]:
        if not self.sequence_buckets:
            alone = bool(self.pad or self.mask)
            return ["pad, mask: expected sequence_buckets beside them"] if alone else []
        if not self.mask:
            return ["sequence_buckets: expected mask beside it, the input that leaves padding out"]
        if self.pad.get(self.mask, 0) != 0:
            return [f"pad.{self.mask}: expected 0, since it is the mask, got {self.pad[self.mask]}"]
        return []

    @property
    def record(self) -> RecordTransform | None:
        """The conversion of records, if that is the transform."""
        return self.transform.record if isinstance(self.transform, TransformTable) else None

    @property
    def opens_with_code(self) -> bool:
        """True if opening a version runs its Python files, or a library reads its tokenizer."""
        imports_model = self.backend == "python" and not self.inputs
        return imports_model or bool(self.code_beside) or self.tokens is not None

    @property
    def code_beside(self) -> set[str]:
        """Names of the Python files beside `model.toml` that the configuration uses."""
        files = {"transform.py": self.transform == "python", "postprocess.py": bool(self.python)}
        return {name for name, is_used in files.items() if is_used}

    @property
    def python(self) -> PythonAnswer | None:
        """The user's function behind the model; None if there is none."""
        return None if self.answer is None else self.answer.python

    @property
    def cores(self) -> str:
        """The process' part of the machine's cores, as in the settings (`executor.cores`)."""
        return self._cores

    @property
    def tokens(self) -> TokensTransform | None:
        """The conversion of texts to tokens, if that is the transform."""
        return self.transform.tokens if isinstance(self.transform, TransformTable) else None

    @property
    def decoded(self) -> str:
        """Output whose ids become texts; empty if there is none."""
        return self.tokens.decode if self.tokens is not None else ""

    @property
    def takes_json(self) -> bool:
        """True if JSON for the model is a payload and not a map of tensors."""
        table = self.transform
        return isinstance(table, TransformTable) and bool(table.record or table.tokens)

    def declares(self, key: str) -> bool:
        """Return whether the model's own file sets this key."""
        return key in self._declared

    @property
    def execution_providers(self) -> tuple[str, ...]:
        """ONNX Runtime's provider names, first choice first."""
        return self.providers or ((CPU,) if self.device == "cpu" else (CUDA,))


def find_model_config(directory: Path) -> Path:
    """Return the file with a model's configuration, which need not be there: `model.toml`, or
    Triton's `config.pbtxt` if there is only that.
    """
    own, triton = directory / OWN_FILE, directory / _TRITON_FILE
    return triton if triton.exists() and not own.exists() else own


def read_model_config(
    path: Path, settings: Settings, overrides: Mapping[str, Any] = _NONE
) -> ModelConfig:
    """Read a model's configuration; without a file, all values come from the settings.

    Args:
        path: of the file.
        settings: defaults of missing keys.
        overrides: values for keys, instead of those in the file.

    Raises:
        ConfigurationError: with one line per fault.
    """
    text = ""
    try:
        if path.exists() and not path.is_file():  # reading a pipe would never end
            raise ConfigurationError(f"{path}: expected a file, got something else")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    values = _parse(text, path.name, path.parent.name, origin=str(path))
    return make_model_config(values, settings, overrides, origin=str(path))


def parse_model_config(
    files: Mapping[str, str],
    model: str,
    settings: Settings,
    overrides: Mapping[str, Any],
) -> ModelConfig:
    """Make a configuration from the texts of the files beside a model's versions.

    Overrides are as for `read_model_config`.

    Raises:
        ConfigurationError: with one line per fault.
    """
    name = next((each for each in CONFIG_FILES if each in files), OWN_FILE)
    values = _parse(files.get(name, ""), name, model, origin=name)
    return make_model_config(values, settings, overrides, origin=name)


def _parse(text: str, name: str, model: str, *, origin: str) -> Mapping[str, Any]:
    try:
        if name == _TRITON_FILE:
            from headrace.models.triton_config import parse_triton_config  # with Protobuf

            return parse_triton_config(text, model)
        return tomllib.loads(text)
    except ValueError as error:  # also integers with thousands of digits
        faults = "\n".join(f"{origin}: {line}" for line in str(error).splitlines())
        raise ConfigurationError(faults) from error
    except RecursionError as error:
        raise ConfigurationError(f"{origin}: expected TOML, got too many levels") from error


def make_model_config(
    values: Mapping[str, Any],
    settings: Settings,
    overrides: Mapping[str, Any] = _NONE,
    *,
    origin: str = "model.toml",
) -> ModelConfig:
    """Make a configuration from plain values, with overrides of them, over the settings.

    Raises:
        ConfigurationError: with one line per fault; `origin` is where the values are from.
    """
    values = {**values, **overrides}
    defaults = settings.batching.model_dump() | settings.executor.model_dump(exclude={"cores"})
    if settings.executor.device == "cpu" and values.get("device", "cpu") != "cpu":
        defaults["instances"] = 1  # the number of instances in [executor] was meant for the CPU
    try:
        config = ModelConfig.model_validate(defaults | dict(values))
    except ValidationError as error:
        faults = (
            f"{_place(fault['loc'], origin, overrides)}: {_key(fault['loc'])}{_described(fault)}"
            for fault in error.errors(include_url=False)
        )
        raise ConfigurationError("\n".join(dict.fromkeys(faults))) from error
    config._declared = frozenset(values)
    config._cores = settings.executor.cores
    return config


def _place(location: tuple[int | str, ...], origin: str, overrides: Mapping[str, Any]) -> str:
    """Return where a faulty value is from; a fault of several values may be of both."""
    if not location:
        return f"{origin} with overrides" if overrides else origin
    return "overrides" if location[0] in overrides else origin


def _described(fault: ErrorDetails) -> str:
    if fault["type"] != "extra_forbidden":
        return describe_fault(fault)
    *table, name = fault["loc"]
    # Keys of tables may be those of one of several forms, so only the others are compared.
    near = [] if table else difflib.get_close_matches(str(name), ModelConfig.model_fields, n=1)
    return "there is no such key" + (f"; did you mean `{near[0]}`?" if near else "")


def _key(location: tuple[int | str, ...]) -> str:
    """Return the key as it stands in the file, without pydantic's names of union members."""
    parts = [str(part) for part in location if not _UNION_PART.search(str(part))]
    return ".".join(parts) + ": " if parts else ""
