"""Settings of the conversion of media to inputs: tables of `transform` in `model.toml`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from headrace.config import NOT_BOOL, Real


class _MediaTable(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


def as_tuple(value: object) -> object:
    """Return a value, alone or in a list, as a sequence of values."""
    return value if isinstance(value, list | tuple) else (value,)


_Pixels = Annotated[int, Field(ge=1, le=65_535), NOT_BOOL]
_Finite = Annotated[Real, Field(ge=-1e30, le=1e30), NOT_BOOL]
_Positive = Annotated[Real, Field(gt=0, le=1e30), NOT_BOOL]


class ImageTransform(_MediaTable):
    """Conversion of images to an input of 4 dimensions, one row for each image."""

    color: Literal["RGB", "BGR", "gray"] = "RGB"
    layout: Literal["NCHW", "NHWC"] | None = None
    """Layout of the input; by default the place of its channels says it."""
    size: tuple[_Pixels, _Pixels] | None = None
    """Height and width; by default those of the input. Without either, images keep their own."""
    fit: Literal["stretch", "crop", "letterbox"] = "stretch"
    """Stretch the image; or cover the size and crop the middle; or fit into it with borders."""
    shortest_side: _Pixels | None = None
    """Length of the shorter side before the middle is cropped; only with crop."""
    resize: Literal["nearest", "bilinear", "bicubic", "area"] = "bilinear"
    fill: Annotated[int, Field(ge=0, le=255), NOT_BOOL] = 0
    """Value of the borders of a letterbox."""
    scale: _Finite | None = None
    """Factor of the values 0 to 255, for inputs of floats; by default 1/255."""
    mean: Annotated[tuple[_Finite, ...], Field(min_length=1), BeforeValidator(as_tuple)] = (0.0,)
    """Subtracted from the scaled values: one number, or one for each channel."""
    deviation: Annotated[tuple[_Positive, ...], Field(min_length=1), BeforeValidator(as_tuple)] = (
        1.0,
    )
    """Divides the result: one number, or one for each channel."""
    draft: bool = False
    """Decode JPEGs at a half, a quarter or an eighth of their size if that still covers the size to
    resize to: much faster, with slightly other values."""
    frames: Literal["refuse", "first"] = "refuse"
    """Refuse files of several frames or pages, or take the first one."""
    max_pixels: Annotated[int, Field(ge=1, le=89_478_485), NOT_BOOL] = 16_777_216
    """Most pixels of an image; checked before they are decoded."""
    max_images: Annotated[int, Field(ge=1, le=10_000), NOT_BOOL] = 32
    """Most images of a payload in parts."""

    @model_validator(mode="after")
    def _values_agree(self) -> Self:
        if self.shortest_side is not None and self.fit != "crop":
            raise ValueError('shortest_side: expected fit = "crop" beside it')
        channels = 1 if self.color == "gray" else 3
        for name, values in (("mean", self.mean), ("deviation", self.deviation)):
            if len(values) not in (1, channels):
                raise ValueError(
                    f"{name}: expected one number or {channels}, one for each channel of "
                    f"{self.color}, got {len(values)}"
                )
        return self


_Count = Annotated[int, Field(ge=1, le=2**24), NOT_BOOL]


class LogMel(_MediaTable):
    """Spectrum in mel bands, see `headrace.models.inputs.mel`."""

    n_fft: Annotated[int, Field(ge=2, le=65_536), NOT_BOOL] = 400
    window: Annotated[int, Field(ge=2, le=65_536), NOT_BOOL] | None = None
    """Samples of the Hann window; by default `n_fft`."""
    hop: Annotated[int, Field(ge=1, le=65_536), NOT_BOOL] = 160
    """Samples from one column to the next."""
    n_mels: Annotated[int, Field(ge=1, le=1024), NOT_BOOL] = 80
    fmin: Annotated[Real, Field(ge=0, le=1e6), NOT_BOOL] = 0.0
    fmax: Annotated[Real, Field(gt=0, le=1e6), NOT_BOOL] | None = None
    """Highest frequency in Hz; by default half of the sample rate."""
    mel_scale: Literal["htk", "slaney"] = "slaney"
    mel_norm: Literal["slaney", "none"] = "slaney"
    """Divide each band by its width in Hz, or leave its peak at 1."""
    triangles: Literal["hz", "mel"] = "hz"
    """Scale on which the sides of a band are straight."""
    power: Annotated[int, Field(ge=1, le=2), NOT_BOOL] = 2
    """Exponent of the magnitudes."""
    log: Literal["ln", "log10", "db"] = "log10"
    offset: Annotated[Real, Field(ge=0, le=1e6), NOT_BOOL] = 0.0
    """Added before the logarithm."""
    floor: Annotated[Real, Field(gt=0, le=1e6), NOT_BOOL] = 1e-10
    """Smallest argument of the logarithm."""
    dynamic_range: Annotated[Real, Field(gt=0, le=1e6), NOT_BOOL] | None = None
    """Values further below the sound's largest are raised to that."""
    padding: Literal["reflect", "zeros", "none"] = "reflect"
    """Samples added before and behind the sound, half a window each; none: the first column begins
    with the first sample."""
    drop_last: bool = False
    """Leave out the last column."""

    @property
    def window_size(self) -> int:
        """Samples of a window."""
        return self.window or self.n_fft

    @model_validator(mode="after")
    def _values_agree(self) -> Self:
        if self.window_size > self.n_fft:
            raise ValueError(f"window: expected at most n_fft = {self.n_fft}, got {self.window}")
        if self.fmax is not None and self.fmin >= self.fmax:
            raise ValueError(f"fmin: expected less than fmax = {self.fmax}, got {self.fmin}")
        return self


class SoundFrames(_MediaTable):
    """Frames that a sound is cut into, which become rows. A step is a sample, or a column of
    `log_mel`.
    """

    length: _Count
    """Steps of a frame."""
    hop: _Count
    """Steps from the begin of one frame to that of the next."""
    tail: Literal["pad", "drop"] = "pad"
    """Follow the last frame by silence, or leave out what fills none."""


class SoundTransform(_MediaTable):
    """Conversion of a sound to the input of a model."""

    sample_rate: Annotated[int, Field(ge=1000, le=384_000), NOT_BOOL] = 16_000
    """Samples a second of the input; sounds of another rate are resampled."""
    quality: Literal["QQ", "LQ", "MQ", "HQ", "VHQ"] = "HQ"
    """Quality of resampling, in the words of soxr."""
    seconds: Annotated[Real, Field(gt=0, le=86_400), NOT_BOOL] | None = None
    """Length of every sound, shorter ones followed by silence; by default that of the input."""
    max_seconds: Annotated[Real, Field(gt=0, le=86_400), NOT_BOOL] = 60.0
    """Longest sound if the length is open; checked before it is decoded."""
    truncate: bool = False
    """Take the begin of longer sounds, instead of refusing them."""
    normalize: bool = False
    """Give the samples of each sound a mean of 0 and a deviation of 1."""
    mean: _Finite = 0.0
    """Subtracted from the result."""
    deviation: _Positive = 1.0
    """Divides the result."""
    log_mel: LogMel | None = None
    """Make a spectrum; by default the input has the samples."""
    layout: Literal["mel_time", "time_mel"] | None = None
    """Order of the axes of a spectrum, where the input's dimensions do not say it."""
    frames: SoundFrames | None = None
    max_rows: Annotated[int, Field(ge=1, le=100_000), NOT_BOOL] = 4096
    """Most frames of a payload."""
    max_samples: Annotated[int, Field(ge=1, le=2**28), NOT_BOOL] = 16_777_216
    """Most samples of a payload, over all channels; checked before they are decoded."""
    max_sounds: Annotated[int, Field(ge=1, le=10_000), NOT_BOOL] = 32
    """Most sounds of a payload."""

    @model_validator(mode="after")
    def _values_agree(self) -> Self:
        if self.log_mel is None and self.layout is not None:
            raise ValueError("layout: expected log_mel beside it")
        if self.log_mel is not None and (self.log_mel.fmax or 0) > self.sample_rate / 2:
            raise ValueError(
                f"log_mel.fmax: expected at most {self.sample_rate / 2:g}, half of sample_rate, "
                f"got {self.log_mel.fmax}"
            )
        if self.log_mel is not None and self.log_mel.fmin >= self.sample_rate / 2:
            raise ValueError(
                f"log_mel.fmin: expected less than {self.sample_rate / 2:g}, half of sample_rate, "
                f"got {self.log_mel.fmin}"
            )
        return self


class TokensTransform(_MediaTable):
    """Conversion of texts to token ids, one row for each text or pair."""

    tokenizer: Annotated[str, Field(min_length=1)] = "tokenizer.json"
    """File in the version's directory: JSON of tokenizers, or a model of SentencePiece."""
    ids: str = "input_ids"
    """Input with the ids."""
    mask: str = "attention_mask"
    """Input with 1 for tokens and 0 for padding, if the model has it."""
    type_ids: str = "token_type_ids"
    """Input with the number of the text in its pair, if the model has it."""
    offsets: str = ""
    """Input with first and last character of each token."""
    text: str = "text"
    """Field of JSON objects with the text."""
    pair: str = ""
    """Field of JSON objects with the second text of a pair."""
    special_tokens: bool = True
    """Add the tokens that a `tokenizer.json` puts around texts."""
    bos: bool = False
    """Add the token for the begin of a text; only with SentencePiece."""
    eos: bool = False
    """Add the token for the end of a text; only with SentencePiece."""
    decode: str = ""
    """Output with ids, whose texts are a further output."""
    truncate: bool = False
    """Shorten texts to `max_tokens`, or to a narrower input; otherwise longer ones are refused."""
    max_tokens: Annotated[int, Field(ge=1, le=1_000_000), NOT_BOOL] = 512
    max_bytes: Annotated[int, Field(ge=1, le=2**31 - 1), NOT_BOOL] | None = None
    """Most bytes of a text, which are checked before it is split; by default 16 for each token."""
    max_rows: Annotated[int, Field(ge=1, le=10_000), NOT_BOOL] = 64
    """Most texts of a payload."""

    @property
    def asked(self) -> list[str]:
        """The inputs that the file names."""
        keys = self.model_fields_set & {"ids", "mask", "type_ids", "offsets"}
        return [name for key in sorted(keys) if (name := str(getattr(self, key)))]
