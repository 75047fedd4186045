"""Images, video and audio as they cross a process border, and how a model wants them.

The front decodes and resizes; it cuts the pixels into *rows*, one for each patch, and puts as many
placeholder tokens into the prompt as the encoder will give rows of hidden size. Pixels travel as
uint8: rescaling and normalization happen in the encoder. `MediaForm` says per kind what a model
takes; it is told in `Hello.media`, and both the front and the core check inputs against it.

The rows of a grid of t x h x w patches of p x p pixels lie in this order (that of the reference
processors): by t; then windows of merge x merge patches, from top to bottom and left to right; then
the patches within a window likewise. Within a row: channel (red, green, blue), then frame (a row
of a video may hold several), then y, then x. With merge 1 that is plain raster order.

An input's tokens lie in the same order: one for each window of each t.
"""

from __future__ import annotations

import math

import msgspec

PROMPT = "prompt"
"""The kind of vectors in place of tokens (back/layers/prompt_vectors.py): each is a row of float32,
as wide as the decoder, and stands for one token of text."""
KINDS = ("image", "video", "audio", PROMPT)
KEY_BYTES = 32
MARK_BYTES = 16
MAX_ROWS = 65_536
"""Patches of one input at most."""
MAX_REQUEST_BYTES = 256 << 20
"""Rows of all inputs of one request at most."""
MAX_STEP_S = 3600.0
MAX_TIME_POSITIONS = 32_768
"""Positions of the decoder that the time of one video may take."""


Strides = tuple[tuple[int, int, int], ...]
"""Convolutions along time: frames seen, step, frames that are filled up on each side."""


def length_after(length: int, strides: Strides) -> int:
    """What is left of a length behind convolutions."""
    for seen, step, filled in strides:
        length = (length + 2 * filled - seen) // step + 1
    return max(0, length)


def encoder_outputs(shape: tuple[int, ...], frames: int) -> int:
    """Of an encoder of speech that reads so many frames. `shape`: bands and frames of spectrograms
    of one size, two frames for each output; or the values of a frame, the most frames, and three
    numbers for each of the Strides that frames go through."""
    if len(shape) == 2:
        return shape[1] // 2
    rest = shape[2:]
    return length_after(frames, tuple(zip(rest[::3], rest[1::3], rest[2::3], strict=True)))


class SoundSteps(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the frames of a sound become tokens.

    strides    of the convolutions before the tower's layers
    pool       positions behind them that become one token
    chunk      frames that are read apart from others; 0: all are read together
    per_chunk  tokens of a chunk, however few frames it has; 0: as many as its positions give
    margin     frames behind the last one, which are seen and have no token
    row        tokens between two of `MediaForm.breaks`; 0: there is none
    """

    strides: Strides = ()
    pool: int = 1
    chunk: int = 0
    per_chunk: int = 0
    margin: int = 0
    row: int = 0

    def positions(self, frames: int) -> int:
        """Of a chunk, behind the convolutions."""
        if self.per_chunk:
            frames = self.chunk
        return length_after(frames - self.margin, self.strides)

    def tokens(self, frames: int) -> int:
        """Of a sound."""
        whole, rest = divmod(frames, self.chunk or frames or 1)
        if self.per_chunk:
            return (whole + (rest > 0)) * self.per_chunk
        positions = whole * self.positions(self.chunk or frames)
        return (positions + (self.positions(rest) if rest else 0)) // self.pool


class MediaCut(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What of an input's windows becomes tokens, where it is not each one in its order.

    columns      steps of the grid are tiles of one picture, so many side by side; 0: they are not,
                 and all is shown
    height       rows of windows of that picture that are shown
    width        columns of windows that are shown
    tail         whether one more learned row stands behind all
    kept         a bit for each window of the input, the first one highest in its byte: those that
                 are left where some are pruned; empty: none is
    """

    columns: int = 0
    height: int = 0
    width: int = 0
    tail: bool = False
    kept: bytes = b""

    @property
    def num_kept(self) -> int:
        """Windows that are left of those that are pruned."""
        return int.from_bytes(self.kept, "big").bit_count()


class Packing(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the windows of inputs with a cut become rows of hidden size.

    newline      a learned row stands behind each row of what is shown
    tails        a learned row may stand behind all (`MediaCut.tail`)
    middle       what is shown is the picture's middle, else its upper left
    most         windows of what is shown, beyond whose number (by a tenth of the side and more) it
                 is resized to so many; 0: any
    halved       each step is resized to half its sides first, rounded up
    marks        ids of tokens that a learned row each stands for wherever they are in a prompt with
                 such inputs
    """

    newline: bool = False
    tails: bool = False
    middle: bool = False
    most: int = 0
    halved: bool = False
    marks: tuple[int, ...] = ()

    @property
    def num_learned(self) -> int:
        """Learned rows behind those of an encoder's windows: the newline, the tail, the marks."""
        return self.newline + self.tails + len(self.marks)

    def size(self, cut: MediaCut) -> tuple[int, int]:
        """Rows and columns of what is shown, resized where there are too many."""
        ratio = math.sqrt(cut.height * cut.width / self.most) if self.most else 0.0
        if ratio <= 1.1:
            return cut.height, cut.width
        return int(cut.height // ratio), int(cut.width // ratio)

    def num_rows(self, grid: tuple[int, int, int], merge: int, cut: MediaCut) -> int:
        """Of an input with a cut."""
        t, h, w = grid[0], grid[1] // merge, grid[2] // merge
        if self.halved:
            h, w = -(-h // 2), -(-w // 2)
        count = t * h * w
        if cut.columns:
            rows, columns = self.size(cut)
            count = rows * (columns + self.newline)
        return count + cut.tail

    def problem(self, grid: tuple[int, int, int], merge: int, cut: MediaCut) -> str:
        """What is wrong with a cut, or ""."""
        if cut.tail and not self.tails:
            return "tail: this model has none"
        if not cut.columns:
            return ""
        if cut.columns < 0 or grid[0] % cut.columns:
            return f"columns: {cut.columns}, a divisor of {grid[0]} is needed"
        height, width = grid[1] // merge * (grid[0] // cut.columns), grid[2] // merge * cut.columns
        if not (0 < cut.height <= height and 0 < cut.width <= width):
            return f"{cut.height} x {cut.width} windows, allowed are 1 to {height} x {width}"
        return ""


class MediaForm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One kind of input as a model takes it.

    kind         image, video, audio or PROMPT
    row_bytes    bytes of a row: 3 * frames * patch * patch of pixels
    patch        pixels of a patch's side
    frames       frames in a row of a video that belong to one t; images: 1
    merge        patches per side of the window that becomes one token
    max_rows     rows of one input at most
    sides        the only (h, w) of a grid there are, for models with fixed sizes; empty: any
    breaks       tokens of text behind each row of an input's tokens but the last (Pixtral's
                 [IMG_BREAK], the marks around a second of MiniCPM-o's sound): they count among
                 `MediaSpan.num_tokens`
    max_t        t of an input at most (1: each pair of frames of a video is an input of its own)
    sound        audio: how its frames become tokens; frames are rows, the grid (1, 1, frames)
    positions_per_s  how far apart steps of a video are in the decoder's positions for each second
                 between them (`MediaSpan.step_s`); 0: time does not count
    mutual       which tokens see those behind them too, so that a step computes them together:
                 "input": those of an input each other; "prompt": those of a prompt; "": none
    packing      how inputs with a cut become rows; None: none has one
    mean_t       whether all t of an input become the mean of them
    extra        rows of an input beyond those of its windows, whose places the encoder knows
    row_extra    such rows for each row of windows
    rows_each    rows that an input becomes whatever its size; 0: they follow from its windows
    prunes       whether windows of an input may be left out (`MediaCut.kept`)
    adds         whether rows are added to what stands in their places, whichever tokens these are,
                 also behind the prompt: a token is said for each
    """

    kind: str
    row_bytes: int
    patch: int = 0
    frames: int = 1
    merge: int = 1
    max_rows: int = MAX_ROWS
    sides: tuple[tuple[int, int], ...] = ()
    breaks: int = 0
    max_t: int = MAX_ROWS
    positions_per_s: float = 0.0
    mutual: str = ""
    sound: SoundSteps | None = None
    packing: Packing | None = None
    mean_t: bool = False
    rows_each: int = 0
    extra: int = 0
    row_extra: int = 0
    prunes: bool = False
    adds: bool = False

    def num_rows(self, grid: tuple[int, int, int], cut: MediaCut | None = None) -> int:
        """Rows of hidden size that an input of this grid becomes."""
        if self.rows_each:
            return self.rows_each
        num_rows = grid[0] * grid[1] * grid[2]
        if self.sound is not None:
            return self.sound.tokens(num_rows)
        if cut is not None and cut.kept:
            return cut.num_kept
        if cut is not None and self.packing is not None:
            return self.packing.num_rows(grid, self.merge, cut)
        num_windows = (grid[1] * grid[2] if self.mean_t else num_rows) // self.merge**2
        return num_windows + self.extra + self.row_extra * (grid[0] * grid[1] // self.merge)

    def num_tokens(self, grid: tuple[int, int, int], cut: MediaCut | None = None) -> int:
        """Tokens it takes in a prompt."""
        num_rows = self.num_rows(grid, cut)
        if not self.breaks:
            return num_rows
        return num_rows + self.breaks * (-(-num_rows // self.row_width(grid)) - 1)

    def row_width(self, grid: tuple[int, int, int]) -> int:
        """Rows of hidden size between two breaks."""
        if self.sound is not None:
            return self.sound.row
        return grid[2] // self.merge


class MediaSpan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where an input's tokens stand in a prompt, and the shape of what is encoded.

    kind         image, video or audio
    key          KEY_BYTES bytes: digest of the content and of how it was processed; the same key
                 stands for the same rows, grid and tokens
    offset       position of its first placeholder token in the prompt
    num_tokens   tokens from its first to its last placeholder: t * h * w / merge^2, and the breaks
                 of the form between its rows
    grid         (t, h, w) in patches; h and w are multiples of the form's merge
    step_s       seconds between two t of a video (models whose positions follow time)
    cut          what of it becomes tokens; None: all, in their order
    marks        of a sound that may go on: MARK_BYTES for each token, a digest of what is heard up
                 to it, on which alone what the model keeps of it depends; they stand for it in the
                 prefix cache instead of the key, so that more sound finds what less has left
    first        tokens of its input that stand before it: an input may stand in a prompt in parts,
                 of which the first one has the content
    """

    kind: str
    key: bytes
    offset: int
    num_tokens: int
    grid: tuple[int, int, int]
    step_s: float = 0.0
    cut: MediaCut | None = None
    marks: bytes = b""
    first: int = 0

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.offset + self.num_tokens

    def key_before(self, position: int) -> bytes:
        """What stands for its tokens before this position, of which there is one at least."""
        if not self.marks:
            return self.key
        count = min(position, self.end) - self.offset
        return self.marks[(count - 1) * MARK_BYTES : count * MARK_BYTES]


class MediaInput(MediaSpan, frozen=True, kw_only=True, omit_defaults=True):
    """A span with its content: `rows` holds t * h * w rows of the form's `row_bytes`; none of a
    part that is not the first. `embedded`: they are what the encoder would give, float32
    [num_tokens, WorkerFacts.media_width]. `unsent`: the core has had the content of this key, and
    it is not sent again; MediaGone if it does not have it any more."""

    rows: bytes = b""
    embedded: bool = False
    unsent: bool = False

    def span(self) -> MediaSpan:
        """It without its content."""
        return MediaSpan(
            kind=self.kind,
            key=self.key,
            offset=self.offset,
            num_tokens=self.num_tokens,
            grid=self.grid,
            step_s=self.step_s,
            cut=self.cut,
            marks=self.marks,
            first=self.first,
        )


MEDIA_HOOK = "media"
"""The admission hook whose payload is a `MediaPayload`."""


class MediaContent(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What the encoder turns into rows of hidden size. See MediaInput."""

    key: bytes
    kind: str
    grid: tuple[int, int, int]
    rows: bytes
    cut: MediaCut | None = None
    embedded: bool = False


class MediaWork(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """How far the pass over an input is to be: `done` of `parts` equal parts."""

    key: bytes
    done: int
    parts: int


class MediaPayload(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a step changes in the workers' encoder cache: entries that go, then entries that come
    (and are encoded when a prompt's chunk first reaches their tokens), then what is encoded ahead
    of that, beside the step."""

    evicted: tuple[bytes, ...] = ()
    added: tuple[MediaContent, ...] = ()
    work: tuple[MediaWork, ...] = ()
