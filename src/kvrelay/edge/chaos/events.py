"""A proxy between a worker's KV event publisher and its subscribers, which does to the events what a script says.

    with EventProxy("tcp://127.0.0.1:5557", replay="tcp://127.0.0.1:5558", script="drop 17") as proxy:
        ...            # the gateway gets `events = proxy.events` and `replay = proxy.replay`
        proxy.do("drop tail")
        proxy.actions  # what was done so far

It speaks vLLM's protocol (three frames; replay by ROUTER) and runs on a thread of its own. An endpoint with `bind:`
in front is listened on for publishers that connect; one with `connect:` in front is connected to, for subscribers that
listen.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvrelay.edge.chaos.script import (
    Instruction,
    ReplayCut,
    ReplayDelay,
    ReplayDrop,
    ReplayFault,
    ReplayLast,
    ReplayOff,
    ReplayOn,
    parse_script,
)
from kvrelay.edge.chaos.stream import Action, Batch, Done, FaultyStream
from kvrelay.edge.connectors.vllm.replay import END_SEQ, MAX_MESSAGES, SEQ_BYTES, SILENCE_S

HIGH_WATER_MARK = 100_000
REPLAY_TIMEOUT_S = 30.0
SETTLES_S = 0.1  # after the handshake the publisher still has to learn what is subscribed to
MAX_KEPT_ACTIONS = 100_000
_WAKE = "inproc://chaos"

Socket = zmq.Socket[bytes]


class _Question(NamedTuple):
    """A replay under way: who asked, and what the worker has answered so far."""

    client: bytes
    upstream: Socket
    from_seq: int
    give_up_at: float
    answer: list[list[bytes]]


class _Answer(NamedTuple):
    due: float
    frames: list[list[bytes]]


class EventProxy:
    """Valid inside its `with` block. Raises ZMQError for endpoints that cannot be used, ScriptError for a bad script.

    `replay=None`: no replay endpoint at all. `on_action` is called on the proxy's thread.
    """

    def __init__(
        self,
        upstream: str,
        *,
        replay: str | None = None,
        listen: str = "auto",
        listen_replay: str = "auto",
        script: str = "",
        on_action: Callable[[float, Action], None] | None = None,
    ) -> None:
        self.upstream = upstream
        """Where the publisher is; for `bind:auto` the address that was taken, from `start` on."""
        self._replay_upstream = replay
        self._listen = listen
        self._listen_replay = listen_replay
        self._script = parse_script(script)
        self._on_action = on_action
        self._faults = FaultyStream()
        self._replay_faults: list[ReplayFault] = []
        self._questions: dict[Socket, _Question] = {}
        self._answers: list[_Answer] = []
        self._commands: queue.SimpleQueue[tuple[Instruction | None, threading.Event]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started_at = 0.0
        self._next_seq = 0
        self.events = ""
        self.replay: str | None = None
        self.actions: list[Action] = []
        """What was done so far, batches that passed untouched included; the last `MAX_KEPT_ACTIONS` of it."""

    # --- life ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        self._started_at = time.monotonic()
        self._context: zmq.Context[Socket] = zmq.Context()
        try:
            self._open()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        for instruction in self._script:
            self._obey(instruction)
        self._thread = threading.Thread(target=self._run, name="chaos-events", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._command(None)
        self._thread.join()
        self._wake_out.close(linger=0)
        self._context.destroy(linger=0)

    def wait_until_connected(self, timeout_s: float) -> bool:
        """True once a publisher is connected and knows that everything is wanted; what it sent before is lost."""
        if self._connected.wait(timeout_s):
            time.sleep(SETTLES_S)
            return True
        return False

    # --- commands ------------------------------------------------------------------------------------------------

    def do(self, script: str) -> None:
        """Obeyed when this returns. Raises ScriptError and then obeys nothing of it."""
        for instruction in parse_script(script):
            self._command(instruction)

    def seqs(self, action: str) -> list[int]:
        """Sequence numbers of what was done so far under that name (`pass`, `drop`, `delay`, `release`, ...)."""
        with self._lock:
            return [done.seq for done in self.actions if done.action == action and done.seq is not None]

    @property
    def next_seq(self) -> int:
        """Of the batch that the publisher sends next: one after the last that came, whatever replay was asked for."""
        return self._next_seq

    def withheld(self) -> int:
        """Batches that came and were neither sent nor dropped."""
        return self._faults.withheld()

    def _command(self, instruction: Instruction | None) -> None:
        obeyed = threading.Event()
        self._commands.put((instruction, obeyed))
        with self._lock:
            self._wake_out.send(b"")
        obeyed.wait()

    # --- the thread ----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._in = self._socket(zmq.SUB)
        self._in.setsockopt(zmq.SUBSCRIBE, b"")
        self._connected = threading.Event()
        self._monitor = self._in.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._out = self._socket(zmq.PUB)
        self.events = _attach(self._out, self._listen, binds="connect:" not in self._listen)
        self.upstream = _attach(self._in, self.upstream, binds=self.upstream.startswith("bind:"))
        self._replays = self._socket(zmq.ROUTER)
        if self._replay_upstream is not None:
            self.replay = _attach(self._replays, self._listen_replay, binds=True)
        self._wake_in, self._wake_out = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._wake_in.bind(_WAKE)
        self._wake_out.connect(_WAKE)
        self._poller = zmq.Poller()
        for socket in (self._in, self._monitor, self._replays, self._wake_in):
            self._poller.register(socket, zmq.POLLIN)

    def _socket(self, kind: int) -> Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        return socket

    def _run(self) -> None:
        while True:
            ready = dict(self._poller.poll(self._patience_ms()))
            if self._monitor in ready:
                recv_monitor_message(self._monitor)
                self._connected.set()
            if self._in in ready:
                self._take(self._in.recv_multipart())
            if self._replays in ready:
                self._ask(self._replays.recv_multipart())
            for socket in [socket for socket in self._questions if socket in ready]:
                self._hear(socket)
            if self._wake_in in ready:
                self._wake_in.recv()
                instruction, obeyed = self._commands.get()
                if instruction is None:
                    break
                self._obey(instruction)
                obeyed.set()
            self._keep_time()
        for question in list(self._questions.values()):
            self._end(question)
        self._in.disable_monitor()
        for socket in (self._in, self._monitor, self._out, self._replays, self._wake_in):
            socket.close(linger=0)
        obeyed.set()

    def _patience_ms(self) -> int | None:
        dues = [answer.due for answer in self._answers]
        dues += [question.give_up_at for question in self._questions.values()]
        delayed = self._faults.next_due()
        if delayed is not None:
            dues.append(delayed)
        return max(0, int((min(dues) - time.monotonic()) * 1000) + 1) if dues else None

    def _keep_time(self) -> None:
        now = time.monotonic()
        self._perform(self._faults.due(now))
        for answer in [answer for answer in self._answers if answer.due <= now]:
            self._answers.remove(answer)
            self._send_answer(answer.frames)
        for question in [question for question in self._questions.values() if question.give_up_at <= now]:
            self._end(question)
            if question.answer:
                self._pass_answer(question)
            else:
                self._note(Action("replay_unanswered", seq=question.from_seq, detail="by the worker"))

    def _obey(self, instruction: Instruction) -> None:
        if isinstance(instruction, ReplayFault):
            if isinstance(instruction, ReplayOn):
                self._replay_faults.clear()
            else:
                self._replay_faults.append(instruction)
        else:
            self._perform(self._faults.instruct(instruction))

    # --- events --------------------------------------------------------------------------------------------------

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != SEQ_BYTES:
            self._out.send_multipart(frames)  # what is malformed is for the subscriber to judge
            self._note(Action("pass", detail="not a batch of events"))
            return
        batch = Batch(frames[0], int.from_bytes(frames[1], "big"), tuple(frames))
        self._next_seq = batch.seq + 1
        self._perform(self._faults.arrived(time.monotonic(), batch))

    def _perform(self, done: Done) -> None:
        for batch in done.send:
            self._out.send_multipart(batch.frames)
        for action in done.actions:
            self._note(action)

    def _note(self, action: Action) -> None:
        with self._lock:
            self.actions.append(action)
            del self.actions[:-MAX_KEPT_ACTIONS]
        if self._on_action is not None:
            self._on_action(time.monotonic() - self._started_at, action)

    # --- replay --------------------------------------------------------------------------------------------------

    def _ask(self, frames: list[bytes]) -> None:
        client, request = frames[0], frames[1:]
        from_seq = int.from_bytes(request[-1], "big") if len(request[-1]) == SEQ_BYTES else None
        if any(isinstance(fault, ReplayOff) for fault in self._replay_faults):
            self._note(Action("replay_unanswered", seq=from_seq, detail="replay off"))
            return
        assert self._replay_upstream is not None
        upstream = self._socket(zmq.DEALER)
        upstream.connect(self._replay_upstream)
        upstream.send_multipart(request)
        self._questions[upstream] = _Question(client, upstream, from_seq or 0, time.monotonic() + REPLAY_TIMEOUT_S, [])
        self._poller.register(upstream, zmq.POLLIN)

    def _hear(self, socket: Socket) -> None:
        """The answer is passed on when all has come that will: what is cut or left out depends on all of it. One that
        the worker itself cut falls silent; it goes on as it is, and who asked will ask for the rest."""
        frames = socket.recv_multipart()
        question = self._questions[socket]._replace(give_up_at=time.monotonic() + SILENCE_S)
        question.answer.append(frames)
        self._questions[socket] = question
        if _ends(frames) or len(question.answer) > MAX_MESSAGES:
            self._end(question)
            self._pass_answer(question)

    def _end(self, question: _Question) -> None:
        self._poller.unregister(question.upstream)
        del self._questions[question.upstream]
        question.upstream.close(linger=0)

    def _pass_answer(self, question: _Question) -> None:
        came = [frames for frames in question.answer if not _ends(frames)]
        answer, end, delay_s = came, question.answer[len(came) :], 0.0
        for fault in self._replay_faults:
            match fault:
                case ReplayDrop():
                    answer = [frames for frames in answer if _seq_of(frames) not in fault.seqs]
                case ReplayLast():
                    answer = answer[max(0, len(answer) - fault.batches) :]
                case ReplayCut():
                    answer, end = answer[: fault.batches], []
                case ReplayDelay():
                    delay_s += fault.by_s
                case ReplayOn() | ReplayOff():
                    pass
        batches = sum(_seq_of(frames) >= 0 for frames in answer)
        detail = f"{batches} of {len(came)} batches" + (f", {delay_s:g} s late" if delay_s else "")
        self._note(Action("replay", seq=question.from_seq, detail=detail))
        frames = [[question.client, *frames] for frames in (*answer, *end)]
        if delay_s:
            self._answers.append(_Answer(time.monotonic() + delay_s, frames))
        else:
            self._send_answer(frames)

    def _send_answer(self, answer: list[list[bytes]]) -> None:
        for frames in answer:
            self._replays.send_multipart(frames)


def _ends(frames: list[bytes]) -> bool:
    return len(frames) == 4 and frames[2] == END_SEQ


def _seq_of(frames: list[bytes]) -> int:
    """-1 for the end marker and whatever else is no batch."""
    if len(frames) != 4 or len(frames[2]) != SEQ_BYTES or _ends(frames):
        return -1
    return int.from_bytes(frames[2], "big")


def _attach(socket: Socket, endpoint: str, *, binds: bool) -> str:
    """Listens or connects, and says the address with its real port."""
    address = endpoint.removeprefix("bind:").removeprefix("connect:")
    socket.setsockopt(zmq.IPV6, "[" in address)
    if not binds:
        socket.connect(address)
        return address
    socket.bind("tcp://127.0.0.1:*" if address == "auto" else address)
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.rstrip(b"\0").decode()
