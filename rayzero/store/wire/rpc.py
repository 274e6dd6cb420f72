"""What both ends of the gRPC store agree on: methods, limits, the token, and how errors cross the wire."""

from __future__ import annotations

import hmac
import re
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from rayzero import errors
from rayzero.errors import RayZeroError, StoreError, TransferError
from rayzero.security.credentials import OWNER, Credentials, Identity
from rayzero.store._pb.rayzero.v1 import store_pb2 as pb
from rayzero.store.wire.payload import checksum
from rayzero.store.wire.translate import MAX_MESSAGE_CHARS, named_error

Metadata = tuple[tuple[str, str | bytes], ...]

STORE_SERVICE = "rayzero.v1.StoreService"
OWNER_SERVICE = "rayzero.v1.OwnerService"
FOLLOWER_SERVICE = "rayzero.v1.FollowerService"

MAX_MESSAGE_BYTES = 64 << 20  # of any message; a ModelSpec of 10,000 units has about 10 MiB

TOKEN_KEY = "rayzero-token"
MODEL_KEY = "rayzero-model"
EPOCH_KEY = "rayzero-epoch"
LIFE_KEY = "rayzero-life"
LINK_KEY = "rayzero-link"
_ERROR_KEY = "rayzero-error"
_MESSAGE_KEY = "rayzero-message-bin"

_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 64 << 10),
    # A peer whose host has vanished sends nothing: ping it every 10 s, even while no call is open. So a link that
    # swallows everything breaks before the deadline of any call that moves bytes.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # else the answer to a ping has 60 s
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
CHANNEL_OPTIONS = (
    *_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),  # a link repeats its calls itself, over a new channel
)
_TLS_OPTIONS = (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", OWNER))  # [Note: names in certificates]
SERVER_OPTIONS = (
    *_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.server_handshake_timeout_ms", 5_000),  # a client that connects and says nothing, or too slowly, is cut
    ("grpc.max_concurrent_streams", 1_000),  # of one connection; a rank has some dozens
    # What a call that nobody reads may send: gRPC's probe would let it grow to 64 MiB a call. One that is read may send
    # a whole message.
    ("grpc.http2.bdp_probe", 0),
)


# ------------------------------------------------------------------------------------------------------ methods

# [Note: sealed messages] Norms, decisions, hyper-parameters, reports and what transfers announce have a checksum: one
# more field at the message's end, which protobuf skips as unknown: field 20001, fixed64, the xxh3_64 of all bytes
# before it. TCP's own checksum misses one damaged packet in 65,536.
_TAG = bytes([0x89, 0xE2, 0x09])  # 20001 << 3 | fixed64, as a varint
_SEAL_BYTES = len(_TAG) + 8


def seal(message: Any) -> bytes:
    """A protobuf message as bytes, with the checksum."""
    content: bytes = message.SerializeToString()
    return b"".join((content, _TAG, struct.pack("<Q", checksum(content))))


def unseal(sealed: bytes, kind: type[Any]) -> Any:
    """The message of ``kind`` in sealed bytes. Raises TransferError if they are not what was sent."""
    content, end = sealed[:-_SEAL_BYTES], sealed[-_SEAL_BYTES:]
    if end[:-8] != _TAG or end[-8:] != struct.pack("<Q", checksum(content)):
        raise TransferError(f"a {kind.DESCRIPTOR.name} of {len(sealed):,} bytes was damaged on the way")
    try:
        return kind.FromString(content)
    except DecodeError as error:  # the sender has sealed something else
        raise TransferError(f"a message of {len(sealed):,} bytes is no {kind.DESCRIPTOR.name}: {error}") from error


@dataclass(frozen=True, slots=True)
class Method:
    """One method of the .proto: its path, and how its messages are encoded and decoded."""

    path: str
    server_streaming: bool
    request: type[Any]
    response: type[Any]

    def handler(self, behaviour: Any) -> grpc.RpcMethodHandler[Any, Any]:
        """The server's entry for this method; ``behaviour`` is an async function of (requests, context), of which
        gRPC has read nothing then: one request comes. If it was damaged on the way, it is a TransferError."""
        kinds = {False: grpc.stream_unary_rpc_method_handler, True: grpc.stream_stream_rpc_method_handler}
        return kinds[self.server_streaming](behaviour, request_deserializer=self._received, response_serializer=seal)

    def bind(self, channel: Any) -> Any:
        """The client's callable for this method on a sync or aio channel."""
        call = channel.unary_stream if self.server_streaming else channel.unary_unary
        return call(self.path, request_serializer=seal, response_deserializer=partial(unseal, kind=self.response))

    def _received(self, sealed: bytes) -> Any:
        try:
            return unseal(sealed, self.request)
        except TransferError as damaged:  # raised here, it would end the call without a word
            return damaged


def _method(service: str, described: MethodDescriptor) -> Method:
    return Method(
        f"/{service}/{described.name}",
        described.server_streaming,
        GetMessageClass(described.input_type),
        GetMessageClass(described.output_type),
    )


def methods(service: str) -> dict[str, Method]:
    """Every method of a service of store.proto, by name, from the generated descriptors."""
    described = pb.DESCRIPTOR.services_by_name[service.rpartition(".")[2]]
    return {method.name: _method(service, method) for method in described.methods}


def transfers(service: str) -> dict[str, Method]:
    """The transfers of a service's callers, which go over connections for tensors."""
    return methods(service.replace("Service", "Transfers"))


# -------------------------------------------------------------------------------------------------- credentials


def open_channel(address: str, shown: Identity | None, api: Any = grpc) -> Any:
    """A channel to an owner; the caller closes it. ``shown``: None: without TLS. ``api``: grpc, or grpc.aio
    for an event loop."""
    if shown is None or not shown.protects(address):
        return api.insecure_channel(address, options=CHANNEL_OPTIONS)
    own = shown.now
    secured = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
    return api.secure_channel(address, secured, options=_TLS_OPTIONS)


def add_port(server: Any, address: str, shown: Identity | None) -> int:
    """Let a server listen at ``address``; returns the port. With TLS it takes no client without a certificate, and
    shows each what is the newest then. Raises RuntimeError if the port is taken."""
    if shown is None or not shown.protects(address):
        return int(server.add_insecure_port(address))
    latest = shown.now

    def newer() -> Any:  # called at each handshake, one after the other
        nonlocal latest
        if shown.now is latest:
            return None
        latest = shown.now
        return _at_server(latest)

    secured = grpc.dynamic_ssl_server_credentials(_at_server(latest), newer, require_client_authentication=True)
    return int(server.add_secure_port(address, secured))


def _at_server(own: Credentials) -> Any:
    return grpc.ssl_server_certificate_configuration([(own.key, own.certificate)], own.authority)


def token_metadata(token: str, model: int = 0, epoch: int = 0) -> Metadata:
    """The metadata of every call. ``model``: the number of the prepared model that the call is about. ``epoch``: in
    which it is made (protocol/ownership.py)."""
    return ((TOKEN_KEY, token), (MODEL_KEY, str(model)), (EPOCH_KEY, str(epoch)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTerms:
    """What every call of a process to a run's owners shows."""

    token: str = field(repr=False)
    tls: Identity | None = None  # None: no TLS
    model: int = 0  # the number of the prepared model that calls are about
    epoch: int = 0  # in which the owners are these
    memory: Path | None = None  # where owners of this host have their lobbies; None: calls are over gRPC alone

    @property
    def metadata(self) -> Metadata:
        """Of each call."""
        return token_metadata(self.token, self.model, self.epoch)


def life_metadata(rank: int, life: int) -> Metadata:
    """The metadata of a rank's calls: who calls, and how often it has died and come back."""
    return ((LIFE_KEY, f"{rank}.{life}"),)


def caller_of(metadata: Iterable[tuple[str, str | bytes]]) -> tuple[int, int] | None:
    """(rank, life) of a call; None if it does not say. Raises StoreError if it cannot be read."""
    sent = next((value for key, value in metadata if key == LIFE_KEY), None)
    if sent is None:
        return None
    try:
        rank, life = map(int, str(sent).split("."))
    except ValueError:
        raise StoreError(f"{LIFE_KEY} of a call is {sent!r}; it must be a rank and its life") from None
    return rank, life


@dataclass(frozen=True, slots=True)
class LinkNumber:
    """Which of a caller's links, one after the other, a call comes over."""

    caller: str  # "rank 3" or "lead"
    number: int  # the clock when it was opened, ns: it also grows from one life of a rank to the next

    def next(self) -> LinkNumber:
        """The number of a link that is opened now."""
        return LinkNumber(self.caller, max(self.number + 1, time.time_ns()))

    @property
    def metadata(self) -> Metadata:
        """What every call over the link carries, beside ``token_metadata``."""
        return ((LINK_KEY, f"{self.caller} {self.number}"),)


def link_of(metadata: Iterable[tuple[str, str | bytes]]) -> LinkNumber | None:
    """The link that a call comes over; None: its caller does not number its links. Raises StoreError for another
    value."""
    sent = next((value for key, value in metadata if key == LINK_KEY), None)
    if sent is None:
        return None
    caller, _, number = str(sent).rpartition(" ")
    if not number.isdecimal() or len(number) > 100:
        raise StoreError(f"{LINK_KEY} of a call is {str(sent)[:80]!r}; it must be a caller and a number")
    return LinkNumber(caller, int(number))


def model_of(metadata: Iterable[tuple[str, str | bytes]]) -> int:
    """The number of the prepared model that a call is about. Raises StoreError if it is not a number."""
    return _number_of(metadata, MODEL_KEY, "the number of a prepared model")


def epoch_of(metadata: Iterable[tuple[str, str | bytes]]) -> int:
    """The epoch in which a call is made. Raises StoreError if it is not a number."""
    return _number_of(metadata, EPOCH_KEY, "the number of an epoch")


def _number_of(metadata: Iterable[tuple[str, str | bytes]], key: str, what: str) -> int:
    sent = next((value for name, value in metadata if name == key), "0")
    try:
        return int(sent)
    except ValueError:
        raise StoreError(f"{key} of a call is {sent!r}; it must be {what}") from None


def token_matches(metadata: Iterable[tuple[str, str | bytes]], token: str) -> bool:
    """Compare the token in a call's metadata, in constant time."""
    sent = next((value for key, value in metadata if key == TOKEN_KEY), "")
    got = sent if isinstance(sent, bytes) else sent.encode()
    return hmac.compare_digest(got, token.encode())


# ------------------------------------------------------------------------------------------------------- errors

_S = grpc.StatusCode
_UNREADABLE = "Exception deserializing response!"  # grpc's words for an answer that ``unseal`` refuses
_REMOVED = "Stream removed"  # grpc's word for the calls of a connection that ended, such as by a damaged TLS record
_CODES: dict[type[RayZeroError], grpc.StatusCode] = {
    errors.RayZeroError: _S.FAILED_PRECONDITION,
    errors.ConfigError: _S.INVALID_ARGUMENT,
    errors.MemoryPlanError: _S.RESOURCE_EXHAUSTED,
    errors.UnsupportedError: _S.UNIMPLEMENTED,
    errors.DataError: _S.INVALID_ARGUMENT,
    errors.CheckpointError: _S.FAILED_PRECONDITION,
    errors.CheckpointWriteError: _S.FAILED_PRECONDITION,
    errors.CheckpointAbandonedError: _S.FAILED_PRECONDITION,
    errors.GradientAccessError: _S.FAILED_PRECONDITION,
    errors.NonFiniteGradientError: _S.ABORTED,
    errors.StoreError: _S.FAILED_PRECONDITION,
    errors.HandshakeError: _S.FAILED_PRECONDITION,
    errors.StepMismatchError: _S.FAILED_PRECONDITION,
    errors.StateLostError: _S.FAILED_PRECONDITION,
    errors.UntrackedError: _S.FAILED_PRECONDITION,
    errors.AccumulationError: _S.RESOURCE_EXHAUSTED,
    errors.RankLeftError: _S.ABORTED,
    errors.EpochOverError: _S.FAILED_PRECONDITION,
    errors.StallError: _S.DEADLINE_EXCEEDED,
    errors.TransferError: _S.DATA_LOSS,
    errors.StoreClosedError: _S.ABORTED,
    errors.VersionGoneError: _S.FAILED_PRECONDITION,
    errors.RunFailedError: _S.ABORTED,
}
_BARE: dict[grpc.StatusCode, type[RayZeroError]] = {  # for a status that none of our handlers chose
    _S.UNAVAILABLE: errors.TransferError,
    _S.DEADLINE_EXCEEDED: errors.StallError,
    _S.UNAUTHENTICATED: errors.HandshakeError,
    _S.CANCELLED: errors.StoreClosedError,
}


def to_status(error: RayZeroError) -> tuple[grpc.StatusCode, str, Metadata]:
    """How a server sends an error: a code, details for other tools, and metadata for our client."""
    cls = next(cls for cls in type(error).__mro__ if cls in _CODES)
    text = str(error)[:MAX_MESSAGE_CHARS]
    metadata: Metadata = ((_ERROR_KEY, cls.__name__), (_MESSAGE_KEY, text.encode()))
    return _CODES[cls], f"{cls.__name__}: {text[:200]}", metadata


def from_status(error: grpc.RpcError, peer: str) -> RayZeroError:
    """The error that a server sent, or else the RayZeroError that fits a failed call. ``peer``: for messages."""
    sent = dict(cast(Iterable[tuple[str, Any]], error.trailing_metadata() or ()))
    if _ERROR_KEY in sent:
        return named_error(sent[_ERROR_KEY], sent.get(_MESSAGE_KEY, b"").decode())
    code = error.code()
    return _BARE.get(code, StoreError)(f"{peer}: {code.name}: {error.details() or 'no details'}")


def is_broken_link(error: grpc.RpcError, *, met: bool) -> bool:
    """Whether a call failed because its connection did, could not be made, or damaged a message. An error that the
    owner sent is none. ``met``: the owner has answered before: a server that is not of this run, which may listen at
    the port of a process that ended, is a broken link then, and does not refuse the caller."""
    damaged = error.code() is _S.INTERNAL and error.details() == _UNREADABLE
    unwrapped = error.code() is _S.UNKNOWN and str(error.details()).startswith(_REMOVED)
    stranger = met and error.code() in (_S.UNAUTHENTICATED, _S.UNIMPLEMENTED)
    return (error.code() is _S.UNAVAILABLE or damaged or unwrapped or stranger) and not _is_sent(error)


def gave_no_answer(error: grpc.RpcError) -> bool:
    """Whether a call's own deadline ended it: an owner that still runs answers before that."""
    return error.code() is _S.DEADLINE_EXCEEDED and not _is_sent(error)


def _is_sent(error: grpc.RpcError) -> bool:
    return _ERROR_KEY in dict(cast(Iterable[tuple[str, Any]], error.trailing_metadata() or ()))


def break_of(error: grpc.RpcError) -> str:
    """Why a link broke, in a few words: "connection refused" from "... connect: Connection refused (111)"."""
    details = error.details() or error.code().name
    last = re.sub(r"\s*\(\d+\)\)*$", "", re.split(r":\s*", details.strip())[-1])  # without errno
    inner = re.fullmatch(r"[^(]+\((.+)\)", last)  # "Stream removed (Socket closed)"
    said = inner[1] if inner else last
    return said[:1].lower() + said[1:]
