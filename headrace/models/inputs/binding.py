"""Check of a request's inputs against a model's signature, before they cost anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from headrace.errors import Code, Rejected
from headrace.models.inputs.padding import find_bucket
from headrace.models.inputs.ranges import (
    FiniteCheck,
    Range,
    RangeCheck,
    make_finite_checks,
    make_range_checks,
)
from headrace.models.signature import Signature, TensorSpec
from headrace.protocol.messages import InputTensor, RequestedOutput, Tensor
from headrace.protocol.tensors import DATATYPES, check_shape, check_tensor, split_elements
from headrace.tuning import TUNING, ModelTuning

Shapes: TypeAlias = tuple[tuple[int, ...], ...]

_BY_CONTENT = -1
_ROWS = "\0rows"  # no dimension of a model can have this name
_new_tuple = tuple.__new__  # half the cost of calling a NamedTuple's class


class Bound(NamedTuple):
    """A request's inputs after they passed the check.

    Attributes:
        tensors: in the order of the signature.
        rows: size of dimension 0; 1 if the model is not batched.
        shape_class: sizes of all other free dimensions of all inputs, in order; requests of the
            same class can be concatenated along dimension 0.
        size_bytes: total size of all inputs.
        wanted: names of the requested outputs; None for all.
    """

    tensors: tuple[Tensor, ...]
    rows: int
    shape_class: tuple[int, ...]
    size_bytes: int
    wanted: tuple[str, ...] | None


class _CheckedShapes(NamedTuple):
    """Result of a successful shape check. A size is -1 if it depends on the content."""

    rows: int
    shape_class: tuple[int, ...]
    sizes: tuple[int, ...]


class Binder:
    """Checks requests for one model version.

    Accepted shapes are cached, so that a typical request costs one lookup.

    Args:
        signature: signature of the model.
        ranges: lowest and highest allowed value, by input name.
        finite: refuse NaN and infinities.
        tuning: bound of the cache.

    Raises:
        ConfigurationError: a range is for an unknown input, or for one that is not numeric.
    """

    def __init__(
        self,
        signature: Signature,
        ranges: Mapping[str, Range] | None = None,
        *,
        finite: bool = False,
        tuning: ModelTuning = TUNING.models,
    ) -> None:
        self._tuning = tuning
        self._signature = signature
        self._expected = tuple((spec.name, spec.datatype) for spec in signature.inputs)
        self._outputs = {spec.name for spec in signature.outputs}
        self._signature_order = range(len(signature.inputs))
        self._checks: tuple[RangeCheck | FiniteCheck, ...] = (
            *make_range_checks(signature, ranges or {}),
            *(make_finite_checks(signature) if finite else ()),
        )
        self._checked: dict[Shapes, _CheckedShapes] = {}

    def bind(
        self, inputs: Sequence[InputTensor], wanted: Sequence[RequestedOutput] | None = None
    ) -> Bound:
        """Check a request and return its inputs in the order of the signature.

        Raises:
            Rejected: `INVALID_REQUEST` for names, `INVALID_TENSOR` for everything else.
        """
        return self._bind(inputs, wanted, self._signature_order)

    def _bind(
        self,
        inputs: Sequence[InputTensor],
        wanted: Sequence[RequestedOutput] | None,
        order: Sequence[int],
    ) -> Bound:
        """Check inputs; `order` holds their positions in the request, for error messages."""
        if len(inputs) != len(self._expected):
            self._match_names(inputs)
        tensors: list[Tensor] = []
        shapes = []
        for given, (name, datatype) in zip(inputs, self._expected, strict=True):
            if given.name != name or given.datatype != datatype:
                order = self._match_names(inputs)
                return self._bind([inputs[place] for place in order], wanted, order)
            shape = tuple(given.shape)
            shapes.append(shape)
            tensors.append(_new_tuple(Tensor, (name, datatype, shape, given.data)))
        key = tuple(shapes)
        checked = self._checked.get(key)
        if checked is None:
            checked = self._check_shapes(key, order)
        size_bytes = 0
        for position, size in enumerate(checked.sizes):
            nbytes = len(tensors[position].data)
            if nbytes != size:
                self._check_content(tensors[position], order[position])
            size_bytes += nbytes
        for check in self._checks:
            tensor = tensors[check.position]
            check.check(tensor, _describe_location(order[check.position], "data", tensor.name))
        names = None if wanted is None else self._check_wanted(wanted)
        return _new_tuple(
            Bound, (tuple(tensors), checked.rows, checked.shape_class, size_bytes, names)
        )

    def _match_names(self, inputs: Sequence[InputTensor]) -> list[int]:
        """Check names and datatypes; return the request position of each input of the signature."""
        expected = dict(self._expected)
        places: dict[str, int] = {}
        for place, given in enumerate(inputs):
            datatype = expected.get(given.name)
            if datatype is None:
                raise _request_fault(
                    f"inputs[{place}].name", _list_names(expected), f'"{given.name}"'
                )
            if given.name in places:
                raise _request_fault(
                    f"inputs[{place}].name", "each input once", f'"{given.name}" again'
                )
            if given.datatype != datatype:
                where = _describe_location(place, "datatype", given.name)
                raise _tensor_fault(where, datatype, f'"{given.datatype}"')
            places[given.name] = place
        missing = [name for name in expected if name not in places]
        if missing:
            got = ", ".join(places) or "none"
            raise _request_fault(
                "inputs", ", ".join(expected), f"{got}; missing {', '.join(missing)}"
            )
        return [places[name] for name in expected]

    def _check_shapes(self, shapes: Shapes, order: Sequence[int]) -> _CheckedShapes:
        """Check shapes that are not in the cache, and cache the result."""
        seen: dict[str, _Seen] = {}
        shape_class: list[int] = []
        sizes = []
        batched = self._signature.batched
        for spec, shape, place in zip(self._signature.inputs, shapes, order, strict=True):
            where = _describe_location(place, "shape", spec.name)
            _check_fixed(spec, shape, where)
            count = check_shape(spec.datatype, shape, f"inputs[{place}]")
            if batched and not shape[0]:
                raise _tensor_fault(where, "at least one row", str(list(shape)))
            _check_agreement(spec, shape, where, seen, batched=batched)
            shape_class += [
                find_bucket(size, self._signature.buckets)
                for axis, size in enumerate(shape)
                if spec.shape[axis] == -1 and not (batched and axis == 0)
            ]
            by_content = spec.datatype in ("BYTES", "BOOL")
            sizes.append(_BY_CONTENT if by_content else count * DATATYPES[spec.datatype].itemsize)
        rows = shapes[0][0] if batched else 1
        checked = _CheckedShapes(rows, tuple(shape_class), tuple(sizes))
        if len(self._checked) >= self._tuning.cached_layouts:
            self._checked.clear()
        self._checked[shapes] = checked
        return checked

    def _check_content(self, tensor: Tensor, place: int) -> None:
        check_tensor(tensor.datatype, tensor.shape, tensor.data, f"inputs[{place}]")
        if tensor.datatype != "BYTES" or not self._signature.utf8:
            return
        for index, element in enumerate(split_elements(tensor)):
            try:
                element.decode()
            except UnicodeDecodeError as error:
                raise _tensor_fault(
                    _describe_location(place, "data", tensor.name),
                    "UTF-8 in each element",
                    f"byte {element[error.start]:#04x} at {error.start} of element {index}",
                ) from error

    def _check_wanted(self, wanted: Sequence[RequestedOutput]) -> tuple[str, ...] | None:
        """Return the requested names; None for an empty list, which the protocol reads as all."""
        names = tuple(output.name for output in wanted)
        for place, name in enumerate(names):
            where = f"outputs[{place}].name"
            if name not in self._outputs:
                raise _request_fault(where, _list_names(self._outputs), f'"{name}"')
            if name in names[:place]:
                raise _request_fault(where, "each output once", f'"{name}" again')
        return names or None


class _Seen(NamedTuple):
    """Size of a dimension where its name first occurred."""

    size: int
    where: str


def _check_fixed(spec: TensorSpec, shape: tuple[int, ...], where: str) -> None:
    fits = len(shape) == len(spec.shape) and all(
        size in (-1, given) for size, given in zip(spec.shape, shape, strict=True)
    )
    if not fits:
        raise _tensor_fault(where, str(list(spec.shape)), str(list(shape)))


def _check_agreement(
    spec: TensorSpec, shape: tuple[int, ...], where: str, seen: dict[str, _Seen], *, batched: bool
) -> None:
    """Refuse a size that differs from that of the same named dimension elsewhere."""
    for axis, size in enumerate(shape):
        if spec.shape[axis] != -1:
            continue
        name = _ROWS if batched and axis == 0 else spec.dimension(axis)
        first = seen.setdefault(name, _Seen(size, where)) if name else None
        if first is not None and first.size != size:
            label = "rows" if name == _ROWS else name
            raise _tensor_fault(
                where, f"{first.size} {label}, as in {first.where}", f"{size} in {list(shape)}"
            )


def _describe_location(place: int, part: str, name: str) -> str:
    return f"inputs[{place}].{part} ({name})"


def _list_names(names: Iterable[str]) -> str:
    return "one of " + ", ".join(sorted(names))


def _request_fault(where: str, expected: str, got: str) -> Rejected:
    return Rejected.mismatch(Code.INVALID_REQUEST, where, expected=expected, got=got)


def _tensor_fault(where: str, expected: str, got: str) -> Rejected:
    return Rejected.mismatch(Code.INVALID_TENSOR, where, expected=expected, got=got)
