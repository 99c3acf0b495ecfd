"""The exceptions of Stagewire, one tree.

StagewireError
├── ConfigError            an option, field or file the user gave breaks a rule
│   └── UnsupportedModel   the model cannot be cut into stages or attended by our backends
├── TransportError         a link between two ranks
│   ├── PeerLost           the peer is gone, or the epoch was ended
│   ├── HeaderMismatch     a message is not the one the plan said
│   └── TransportUnavailable   this rank, or another, cannot do the transport asked for
│       └── CopyEngineUnavailable
├── CudaError              a CUDA call failed, or the library cannot be loaded; carries CUDA's code
├── DeadlinePassed         a Point was not reached in the time its awaiter gave
├── ControlError           a control channel: malformed, oversized or out-of-order message
└── StageFailed            a rank failed while it served; carries the rank and a one-line cause
    └── RankLost           its process is gone, without a word
"""


class StagewireError(Exception):
    """Base of everything Stagewire raises on purpose. ``str()`` is one line, fit for a user."""


class ConfigError(StagewireError, ValueError):
    """An option or field has a value that breaks a rule; the message names option, value and rule."""


class UnsupportedModel(ConfigError):
    """The model can be read but not served; the message gives the reason."""


class TransportError(StagewireError):
    """A link between two ranks failed."""


class PeerLost(TransportError):
    """The peer of a link is gone, or the engine ended the epoch, while something waited for it."""


class HeaderMismatch(TransportError):
    """A received header differs from what the plan says; the message names both sides."""


class TransportUnavailable(TransportError):
    """The transport that was asked for cannot be used; the message names the rank that cannot and why."""


class CopyEngineUnavailable(TransportUnavailable):
    """The ``copy_engine`` transport was asked for and some rank cannot do it."""


class CudaError(StagewireError):
    """A CUDA driver call failed. ``code`` is its CUresult, -1 when the library cannot be loaded. Most are sticky."""

    def __init__(self, message: str, code: int = -1) -> None:
        super().__init__(message)
        self.code = code


class DeadlinePassed(StagewireError):
    """A Point was not reached in time. What was enqueued goes on, and its buffers stay owned until it is reached."""


class ControlError(StagewireError):
    """A control channel carried a malformed, oversized or unexpected message."""


class StageFailed(StagewireError):
    """A rank failed while serving.

    ``rank`` is the rank that failed, ``cause`` one line without paths or addresses.
    """

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(f"stage {rank} failed: {cause}")
        self.rank = rank
        self.cause = cause


class RankLost(StageFailed):
    """A rank's channel closed although nobody asked the rank to end; its exit status tells more."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, "its process ended")


def one_line(exc: BaseException) -> str:
    """``TypeName: first line of the message``; the bare message for our own errors."""
    text = (str(exc).strip() or "no message").splitlines()[0]
    return text if isinstance(exc, StagewireError) else f"{type(exc).__name__}: {text}"
