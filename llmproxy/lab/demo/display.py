"""The display of the demo: a table that is redrawn in place on a terminal, or else printed periodically."""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from llmproxy.lab.demo.clients import BandOutcomes, DemoClients
from llmproxy.lab.demo.processes import HOST
from llmproxy.tools.terminal import can_draw

PLAIN_INTERVAL_S = 10.0
"""How often the table is printed if it cannot be redrawn in place."""
PLAIN_WIDTH = 80
MESSAGES_SHOWN = 2

Sample = tuple[Mapping[str, str], float]


@dataclass(frozen=True, slots=True)
class DemoReplica:
    """A simulated replica of the demo."""

    name: str
    port: int
    adapters: tuple[str, ...]

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


class Display:
    """Output to a terminal. A pipe or TERM=dumb gets plain lines without control sequences."""

    def __init__(self) -> None:
        self._drawn = can_draw()
        self._console = (
            Console(highlight=False)
            if self._drawn
            else Console(highlight=False, force_terminal=False, color_system=None, width=PLAIN_WIDTH)
        )
        self.keys = self._drawn and sys.stdin.isatty()
        """Whether key presses can be read."""
        self._live: Live | None = None
        self._messages: deque[str] = deque(maxlen=MESSAGES_SHOWN)
        self._printed_s = time.monotonic()
        self.plain_interval_s = PLAIN_INTERVAL_S

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """On a terminal, redraw the table in place during the block."""
        if not self._drawn:
            yield
            return
        live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        with live as self._live:
            yield

    def say(self, text: str) -> None:
        """Print lines that stay on the screen."""
        try:
            print(text, flush=True)
        except BrokenPipeError:
            _end_demo()

    def show_message(self, text: str) -> None:
        """Show a line about the current scene or error."""
        line = f"{time.strftime('%H:%M:%S')}  {text}"
        self._messages.append(line)
        if not self._drawn:
            self.say(line)

    def show(self, page: str, replicas: Sequence[DemoReplica], clients: DemoClients) -> None:
        """Draw the table from the proxy's metrics page and the clients' results."""
        if self._live is not None:
            messages = Text("\n".join(self._messages), no_wrap=True, overflow="ellipsis")
            self._live.update(Group(picture(page, replicas, clients), messages), refresh=True)
        elif time.monotonic() - self._printed_s >= self.plain_interval_s:
            self._printed_s = time.monotonic()
            try:
                self._console.print(picture(page, replicas, clients), Text())
                self._console.file.flush()
            except BrokenPipeError:
                _end_demo()


def _end_demo() -> None:
    """End the demo like a signal, because its output is closed. Further output is discarded."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    signal.raise_signal(signal.SIGTERM)


# --- the picture ------------------------------------------------------------------------------------------------------


def picture(page: str, replicas: Sequence[DemoReplica], clients: DemoClients) -> RenderableType:
    """Returns the tables of replicas, bands and adapters, in at most 80 columns."""
    samples = parsed(page)
    served = summed(samples.get("llmproxy_attempts_total", ()), "backend", verdict="served")
    adapters = [_places(adapter, counts) for adapter, counts in clients.adapters.items()]
    return Group(
        _replicas(samples, replicas, served),
        Text(),
        _bands(summed(samples.get("llmproxy_queued_requests", ()), "band"), clients.bands),
        *(Text(line, no_wrap=True, overflow="ellipsis") for line in adapters),
    )


def _replicas(
    samples: Mapping[str, Sequence[Sample]], replicas: Sequence[DemoReplica], served: Mapping[str, float]
) -> Table:
    numbers = {
        name: summed(samples.get(f"llmproxy_backend_{name}", ()), "backend")
        for name in ("available", "running", "waiting", "limit")
    }
    table = _table("replica", "state", "running", "waiting", "limit", "served", "adapters")
    for replica in replicas:
        at = {name: values.get(replica.name, 0.0) for name, values in numbers.items()}
        up = at["available"] > 0.0
        state = Text("up", "green") if up else Text("down", "red")
        load = [f"{at[name]:.0f}" if up else "-" for name in ("running", "waiting", "limit")]
        loaded = " ".join(adapter.removeprefix("sim-8b-") for adapter in replica.adapters)
        table.add_row(replica.name, state, *load, f"{served.get(replica.name, 0.0):.0f}", loaded)
    return table


def _bands(queued: Mapping[str, float], bands: Mapping[str, BandOutcomes]) -> Table:
    table = _table("band", "queued", "TTFT p50", "p95", "answered", "retried", "refused", "broken", "lost")
    for band, outcomes in bands.items():
        waiting = queued.get(band, 0.0)
        table.add_row(
            band,
            Text(f"{waiting:.0f}", "yellow" if waiting else ""),
            *_quantiles(outcomes.recent_ttft_s()),
            str(outcomes.answered),
            str(outcomes.retried),
            Text(str(outcomes.refused), "yellow" if outcomes.refused else ""),
            str(outcomes.broken),
            Text(str(outcomes.lost), "red" if outcomes.lost else ""),
        )
    return table


def _table(first: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column(first, no_wrap=True, min_width=10)
    for column in columns:
        words = column in ("state", "adapters")
        width = max(len(column), len("12345 ms") if column in ("TTFT p50", "p95") else 0)
        table.add_column(column, no_wrap=True, justify="left" if words else "right", min_width=width)
    return table


def _quantiles(values_s: Sequence[float]) -> tuple[str, str]:
    if len(values_s) < 2:
        return "-", "-"
    cuts = statistics.quantiles(values_s, n=20, method="inclusive")
    return f"{1000 * cuts[9]:.0f} ms", f"{1000 * cuts[18]:.0f} ms"


def _places(adapter: str, counts: Mapping[str, int]) -> str:
    places = ", ".join(f"{name} ({count})" for name, count in sorted(counts.items())) or "no replica yet"
    return f"{adapter.removeprefix('sim-8b-'):<11} requests went to {places}"


def parsed(page: str) -> dict[str, list[Sample]]:
    """Returns the samples of a metrics page by name."""
    samples: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(page):
        for one in family.samples:
            samples.setdefault(one.name, []).append((one.labels, one.value))
    return samples


def summed(samples: Iterable[Sample], label: str, **only: str) -> dict[str, float]:
    """Returns sums of values by one label, over the samples with the label values `only`."""
    sums: dict[str, float] = {}
    for labels, value in samples:
        if only.items() <= labels.items():
            name = labels.get(label, "")
            sums[name] = sums.get(name, 0.0) + value
    return sums
