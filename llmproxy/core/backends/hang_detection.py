"""Detects backends that hang: backends with requests that send nothing, while other backends of the pool work."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from llmproxy.core.backends.adapter_loads import LongestLoad
from llmproxy.core.backends.bookings import GAUGE_LAG_S
from llmproxy.core.backends.health import Hang, Peers
from llmproxy.core.backends.stream_progress import BackendStreams, StreamSpan
from llmproxy.core.domain import Reading
from llmproxy.core.estimates.line import OUTLIER, LearnedLine
from llmproxy.core.settings import HealthSettings

LATE = 5.0  # A silent backend hangs after this multiple of the predicted time until its streams have begun.
TOGETHER = 3  # Number of streams that prove a hang if they stop at once: slow clients would not stop together.
TOGETHER_S = 0.6  # Streams whose last bytes are within this time stopped together. Normal gaps are shorter.
TOGETHER_LATE = 2.0  # Value of LATE for started streams, lower because most engines continue them during prefills.
STUCK_LATE = 2.0  # Multiple of `hung_s` for proved hangs, whose ejection loses all tokens of non-streamed answers.
ASKED_AGAIN_S = 0.75  # Time for an answer to a second poll. The first may have timed out in a pause of the proxy.
UNSEEN_S = 0.5  # Initial estimate of the time until a reading shows a text request, and of the pauses of a counter.


class HangDetection:
    """Judges the silence of backends. The class reports hangs, and changes no backend itself.

    Streams: a backend hangs if first bytes of streams are due and the backend is silent for `hung_s` or LATE times
    their predicted time, whichever is longer, while other backends of its pool work. It also hangs if at least TOGETHER
    started streams stop at once. Fewer prove nothing, because a client may have stopped reading. Long prompts and
    adapter loads explain a long silence. An ejected backend is judged by its probe, even while no other backend works.

    Idle engines: a backend hangs if its scrapes show none of the requests that were sent to it, streamed or not, for
    `hung_s` or several times the usual delay until a scrape shows a request. Requests with media or a grammar have a
    separate usual delay.

    Unanswered polls: a stopped process or a lost machine answers neither polls nor requests, while other backends of
    its pool answer. Such a backend hangs after STUCK_LATE times `hung_s`, if a poll timed out and the next has no
    answer.

    Frozen engines: a backend with answers in flight hangs if its scrapes show requests while its counter of generated
    tokens does not increase. A prefill explains such a pause. So does an earlier pause in the pool, up to several times
    as long. Other backends must work meanwhile, or their scrapes must show that they have no request.
    """

    def __init__(
        self, settings: HealthSettings, peers: Peers, backends: Mapping[str, BackendStreams], prefill: LearnedLine
    ) -> None:
        self.settings = settings
        self.due_s = inf  # The earliest time at which a present silence is too long.
        self._peers = peers
        self._backends = backends
        self._prefill = prefill
        self._unseen = {False: LongestLoad(UNSEEN_S), True: LongestLoad()}
        self._pauses = LongestLoad(UNSEEN_S)
        self._shows_work = self._counts_steps = False

    def see(self, backend: BackendStreams, before: Reading | None, reading: Reading, sequences: int) -> None:
        """Learns from a scrape and the scrape `before` it, while `sequences` of this proxy are in flight."""
        self._see_generated(backend, before, reading)
        self._see_requests(backend, reading, sequences)

    def _see_generated(self, backend: BackendStreams, before: Reading | None, reading: Reading) -> None:
        """Records whether the counter of tokens increased, and how long it paused while the engine had requests."""
        if reading.generated is None:
            return
        had_requests = before is not None and before.running > 0 and reading.running > 0
        if before is not None and reading.generated == before.generated:
            backend.paused_s = backend.paused_s + reading.taken_at_s - before.taken_at_s if had_requests else 0.0
            return
        backend.generated_s = reading.taken_at_s
        if before is not None and before.generated is not None and had_requests:
            # Some engines count the tokens of a request at its end only.
            ended = backend.ended_s >= before.taken_at_s - GAUGE_LAG_S or reading.running < before.running
            self._counts_steps = self._counts_steps or not ended
            if backend.paused_s:
                # The pause of a backend that hung and recovered must not explain a long pause of another backend.
                self._pauses.learn(min(backend.paused_s, OUTLIER * self._pauses.load_s), sure=True)
        backend.paused_s = 0.0

    def _see_requests(self, backend: BackendStreams, reading: Reading, sequences: int) -> None:
        """Marks all requests that were sent before the scrape as seen, if the scrape shows at least as many."""
        shown, sent_s = reading.running + reading.waiting, reading.taken_at_s - GAUGE_LAG_S
        self._shows_work = self._shows_work or shown > 0
        for stream in reversed(backend.unseen.values()):
            if stream.booked_s <= sent_s:
                break
            sequences -= stream.sequences
        if not backend.unseen or shown < max(1, sequences):
            return
        for lease, stream in list(backend.unseen.items()):
            if stream.booked_s > sent_s:
                break
            del backend.unseen[lease]
            self._unseen[stream.prepared].learn(reading.taken_at_s - stream.booked_s, sure=True)

    def idle(self, backend: BackendStreams, now: float) -> bool:
        """Returns whether a recent scrape of a backend shows no request, although it has requests that none has shown.

        False until a scrape in the pool has shown a request.
        """
        reading, first = backend.reading, next(iter(backend.unseen.values()), None)
        return (
            self._shows_work
            and first is not None
            and reading is not None
            and not reading.running
            and not reading.waiting
            # A frozen server gives no reading in the second half of the silence.
            and reading.taken_at_s >= 0.5 * (now + max(first.booked_s, backend.generated_s))
        )

    def stuck(self, backend: BackendStreams, now: float) -> bool:
        """Returns whether a backend has answers in flight, and a scrape late in its silence shows requests.

        False in a pool whose counters of generated tokens do not increase during an answer.
        """
        reading = backend.reading
        return (
            self._counts_steps
            and bool(backend.whole or backend.started)
            and reading is not None
            and reading.generated is not None
            and reading.running + reading.waiting > 0
            and reading.taken_at_s >= 0.5 * (now + self._silent_since(backend, backend.whole))
        )

    def _silent_since(self, backend: BackendStreams, waiting: Mapping[int, StreamSpan]) -> float:
        """Returns when the silence began: at the last byte or token, or later with the first of `waiting`."""
        booked_s = next(iter(waiting.values())).booked_s if waiting else -inf
        return max(backend.last_byte_s, backend.generated_s, booked_s)

    def _unanswered(self, name: str, now: float) -> Hang | None:
        """Returns the evidence that a backend answers neither polls nor requests; None without enough evidence."""
        backend, health = self._backends[name], self._peers.members[name]
        if health.unanswered_s == inf or not (owed := backend.whole | backend.unstarted | backend.started):
            return None
        since_s = self._silent_since(backend, owed)
        # Long prompts and media keep the server busy before its engine sees the request.
        late_s = TOGETHER_LATE * self._prefill.at(max(stream.prompt_tokens for stream in owed.values()))
        late_s = max(late_s, self._unseen[any(stream.prepared for stream in backend.unseen.values())].explained_s(1))
        late_s = max(late_s, STUCK_LATE * self.settings.hung_s, health.unanswered_s + ASKED_AGAIN_S - since_s)
        if self._silent(backend, since_s, late_s, now) and self._peers.others_up(health):
            return Hang(since_s, len(owed), 0, unanswered=True)
        return None

    def hang(self, name: str, now: float) -> Hang | None:
        """Returns the evidence that a backend hangs; None without enough evidence."""
        if (unanswered := self._unanswered(name, now)) is not None:
            return unanswered
        backend, ejected = self._backends[name], self._peers.members[name].ejected
        if self.idle(backend, now):
            unseen = backend.unseen.values()
            since_s = self._silent_since(backend, backend.unseen)
            # The time to the first token includes work that no reading shows, such as tokenisation.
            late_s = LATE * self._prefill.at(sum(stream.prompt_tokens for stream in unseen))
            late_s = max(late_s, self._unseen[any(stream.prepared for stream in unseen)].explained_s(1))
            if self._silent(backend, since_s, late_s, now) and self._peers.others_up(self._peers.members[name]):
                return Hang(since_s, len(unseen), 0, idle=True)
            return None
        if self.stuck(backend, now):
            since_s = self._silent_since(backend, backend.whole)
            # The counter increases as soon as a prompt is computed, so only the longest prompt explains a pause.
            owed = backend.whole | backend.unstarted | backend.started
            longest = max(stream.prompt_tokens for stream in owed.values())
            late_s = max(STUCK_LATE * self.settings.hung_s, LATE * self._prefill.at(longest))
            late_s = max(late_s, self._pauses.explained_s(1), self._prepares_s(backend, since_s, now))
            idle = any(_is_idle(other, since_s, now) for other in self._backends.values() if other is not backend)
            if self._only_silent(backend, since_s, late_s, now, ejected or idle, name):
                return Hang(since_s, len(owed), 0, frozen=True)
        # The prefix may not be cached after all, and a long uncached prompt takes many times as long.
        prompts_s = self._prefill.at(backend.unstarted_tokens_max)
        if backend.unstarted:
            # A started stream may wait for its client; a first byte never does.
            since_s = self._silent_since(backend, backend.unstarted)
            late_s = max(LATE * prompts_s, self._prepares_s(backend, since_s, now))
            if self._only_silent(backend, since_s, late_s, now, ejected, name):
                return Hang(since_s, len(backend.unstarted), 0)
        if not ejected and len(backend.started) >= TOGETHER:
            # An engine may delay generated tokens, such as a tool call until it is complete.
            since_s = max(backend.last_byte_s, backend.generated_s)
            if self._only_silent(backend, since_s, TOGETHER_LATE * prompts_s, now, ejected, name):
                together_s = backend.last_byte_s - TOGETHER_S
                stopped = sum(stream.last_byte_s >= together_s for stream in backend.started.values())
                if stopped >= TOGETHER:
                    return Hang(since_s, len(backend.unstarted), stopped)
        return None

    def _prepares_s(self, backend: BackendStreams, since_s: float, now: float) -> float:
        """Returns how long an engine may prepare requests, such as a grammar or KV blocks, without running any.

        Returns 0 if the last scrape shows running requests, or is older than half of the silence.
        """
        reading = backend.reading
        if reading is None or reading.running or reading.taken_at_s < 0.5 * (now + since_s):
            return 0.0
        return self._unseen[True].explained_s(1)

    def _silent(self, backend: BackendStreams, since_s: float, late_s: float, now: float) -> bool:
        """Returns whether a silence since `since_s` is too long. If not, sets `due_s` to the end of the allowed
        silence, unless `due_s` is earlier.
        """
        until_s = since_s + max(self.settings.hung_s, late_s) + backend.pending_loads.explained_s(since_s)
        if now < until_s:
            self.due_s = min(self.due_s, until_s)
        return now >= until_s

    def _only_silent(
        self, backend: BackendStreams, since_s: float, late_s: float, now: float, certain: bool, name: str
    ) -> bool:
        """Returns whether a backend has been silent for too long since `since_s`, while others could take its requests.

        Unless `certain`, another backend must also have sent a byte or token in the second half of the silence.
        """
        if not self._silent(backend, since_s, late_s, now):
            return False
        if not self._peers.others_up(self._peers.members[name]):
            return False
        if certain:
            return True
        # If all backends are silent, the proxy paused or the network failed.
        others = [other for other in self._backends.values() if other is not backend]
        others_s = max((max(other.last_byte_s, other.generated_s) for other in others), default=-inf)
        return others_s >= 0.5 * (since_s + now)


def _is_idle(backend: BackendStreams, since_s: float, now: float) -> bool:
    """Returns whether a recent scrape shows no request on a backend, which therefore has nothing to generate."""
    reading = backend.reading
    if reading is None or reading.taken_at_s < 0.5 * (since_s + now):
        return False
    return not (reading.running or reading.waiting)
