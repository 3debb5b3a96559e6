"""The event sockets of a fleet: one per source that we connect to, one per endpoint that workers connect to.

Workers that connect come in through the same socket and can be told apart by nothing but the topic of each message. A
message belongs to the worker whose topic it has, or whose topic followed by some separator it begins with: `kv@a` takes
`kv@a@model`, and `kv@ab` never counts as a message of `kv@a`. Topics of nobody are counted and shown, for they are the
usual trace of a misspelt one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import zmq
from msgspec import Struct

from kvrelay.edge.connectors.base import EventSource
from kvrelay.edge.connectors.vllm.subscriber import EventSubscriber, OnConnected, OnMalformed, OnMessage
from kvrelay.edge.fleet.observer import FleetObserver

MAX_UNKNOWN_TOPICS = 32  # kept by name per socket; the count of their messages goes on
MAX_TOPIC_CHARS = 200

_log = logging.getLogger(__name__)


class Subscription(Protocol):
    """Somebody's part of a socket."""

    @property
    def problem(self) -> str | None:
        """Why nothing can come; None as far as is known here."""
        ...

    def close(self) -> None:
        """May be called again."""
        ...


class SharedSocketView(Struct, frozen=True):
    """A socket that workers connect to."""

    endpoint: str
    workers: dict[str, str]  # name -> topic
    unknown_messages: int
    unknown_topics: dict[str, int]  # of the first `MAX_UNKNOWN_TOPICS`: messages


class EventSockets:
    """Valid as long as its context."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], observer: FleetObserver) -> None:
        self._context = context
        self._observer = observer
        self._shared: dict[str, _SharedSocket] = {}

    def subscribe(
        self,
        worker: str,
        source: EventSource,
        *,
        on_message: OnMessage,
        on_malformed: OnMalformed,
        on_connected: OnConnected,
    ) -> Subscription:
        """Raises ZMQError for an endpoint that cannot be used."""
        if not source.bind:
            return EventSubscriber(
                self._context, source, on_message=on_message, on_malformed=on_malformed, on_connected=on_connected
            )
        shared = self._shared.get(source.endpoint)
        if shared is None:
            shared = _SharedSocket(self._context, source.endpoint, self._observer, on_empty=self._shared.pop)
            self._shared[source.endpoint] = shared
        return shared.join(worker, source.topic, on_message, on_malformed, on_connected)

    def views(self) -> list[SharedSocketView]:
        return [shared.view() for shared in self._shared.values()]


class _Member:
    """One worker's part of a shared socket."""

    def __init__(
        self,
        shared: _SharedSocket,
        worker: str,
        topic: bytes,
        on_message: OnMessage,
        on_malformed: OnMalformed,
        on_connected: OnConnected,
    ) -> None:
        self._shared = shared
        self.worker = worker
        self.topic = topic
        self.on_message = on_message
        self.on_malformed = on_malformed
        self.on_connected = on_connected

    @property
    def problem(self) -> str | None:
        return self._shared.problem_of(self)

    def close(self) -> None:
        self._shared.leave(self)


class _SharedSocket:
    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        observer: FleetObserver,
        *,
        on_empty: Callable[[str], object],
    ) -> None:
        self._endpoint = endpoint
        self._observer = observer
        self._on_empty = on_empty
        self._members: list[_Member] = []
        self._owner_of: dict[bytes, _Member | None] = {}  # of topics seen; forgotten when members change
        self._unknown_messages = 0
        self._unknown: dict[str, int] = {}
        self._subscriber = EventSubscriber(
            context,
            EventSource(0, endpoint, bind=True),
            on_message=self._on_message,
            on_malformed=self._on_malformed,
            on_connected=self._on_connected,
        )

    def join(
        self, worker: str, topic: str, on_message: OnMessage, on_malformed: OnMalformed, on_connected: OnConnected
    ) -> _Member:
        member = _Member(self, worker, topic.encode(), on_message, on_malformed, on_connected)
        self._members.append(member)
        self._owner_of.clear()
        return member

    def leave(self, member: _Member) -> None:
        if member not in self._members:
            return
        self._members.remove(member)
        self._owner_of.clear()
        if not self._members:
            self._subscriber.close()
            self._on_empty(self._endpoint)

    def problem_of(self, member: _Member) -> str | None:
        others = [other for other in self._members if other.worker != member.worker]
        if not member.topic and others:
            return f"it shares {self._endpoint} with {others[0].worker} and has no `topic` to be told apart by"
        before = self._members[: self._members.index(member)] if member in self._members else []
        taken = next((other for other in before if other.topic == member.topic and other in others), None)
        if taken is not None:
            return f"its topic {member.topic.decode()} on {self._endpoint} is that of {taken.worker}"
        return None

    def view(self) -> SharedSocketView:
        return SharedSocketView(
            endpoint=self._endpoint,
            workers={member.worker: member.topic.decode() for member in self._members},
            unknown_messages=self._unknown_messages,
            unknown_topics=dict(self._unknown),
        )

    def _on_message(self, topic: bytes, seq: int, payload: bytes) -> None:
        owner = self._owner(topic)
        if owner is not None:
            owner.on_message(topic, seq, payload)

    def _on_malformed(self, topic: bytes, reason: str) -> None:
        owner = self._owner(topic)
        if owner is not None:
            owner.on_malformed(topic, reason)

    def _on_connected(self) -> None:
        """Some worker connected: which one, zmq does not say."""
        for member in tuple(self._members):
            member.on_connected()

    def _owner(self, topic: bytes) -> _Member | None:
        if topic not in self._owner_of:
            if len(self._owner_of) >= 10 * MAX_UNKNOWN_TOPICS + len(self._members):
                self._owner_of.clear()
            self._owner_of[topic] = self._find_owner(topic)
        owner = self._owner_of[topic]
        if owner is None:
            self._count_unknown(topic)
        return owner

    def _find_owner(self, topic: bytes) -> _Member | None:
        """The longest topic that fits; of equal ones the first."""
        fitting = [member for member in self._members if _fits(member.topic, topic) and member.problem is None]
        return max(fitting, key=lambda member: len(member.topic), default=None)

    def _count_unknown(self, topic: bytes) -> None:
        self._unknown_messages += 1
        self._observer.count_unknown_topic(self._endpoint)
        name = topic[:MAX_TOPIC_CHARS].decode("utf-8", "replace")
        if name not in self._unknown:
            if len(self._unknown) >= MAX_UNKNOWN_TOPICS:
                return
            known = ", ".join(member.topic.decode() for member in self._members) or "none"
            _log.warning("events_of_nobody endpoint=%s topic=%r; known topics: %s", self._endpoint, name, known)
        self._unknown[name] = self._unknown.get(name, 0) + 1


def _fits(own: bytes, topic: bytes) -> bool:
    if not topic.startswith(own):
        return False
    return _ends_a_name(own[-1:]) or _ends_a_name(topic[len(own) : len(own) + 1])


def _ends_a_name(byte: bytes) -> bool:
    """No byte does, and so does a separator."""
    return not (byte.isalnum() or byte in (b"-", b"_", b"."))
