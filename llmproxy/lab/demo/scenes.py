"""The scenes of the demo: what a person can bring about with a key, and what the demo plays by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import cycle

import aiohttp

from llmproxy.lab.demo.clients import MODEL, Source
from llmproxy.lab.demo.processes import Processes

QUIET_S = 6.0
SLOWER = 8.0
NEW_ADAPTER = f"{MODEL}-legal"
LAST_ONES_S = 5.0
"""After the last request for the new adapter until it is unloaded. One that still waits would wait until it expires."""
ADMIN_KEY = "demo-admin"
LEAD = " "
"""The key that lets the demo lead again."""


@dataclass(frozen=True, slots=True)
class Scene:
    """`news` is what is said when it begins; `{victim}` is the replica that it happens to."""

    key: str
    name: str
    seconds: float
    news: str
    sources: tuple[Source, ...] = ()

    @property
    def place(self) -> str:
        """The path of its button at the proxy. Below it, `/began` takes note that it began."""
        return f"/admin/scenes/{self.name.replace(' ', '-')}"


FLOOD = Scene(
    "f", "flood", 15.0, "flood of batch work: sheddable requests wait, critical ones go first",
    (Source("sheddable", "batch", 12.0),),
)  # fmt: skip
BURST = Scene(
    "c", "burst", 6.0, "burst of critical requests: lower bands wait for them",
    (Source("critical", "acme", 14.0),),
)  # fmt: skip
NOISY = Scene(
    "n", "noisy tenant", 15.0, "a noisy tenant: it waits for itself, acme and globex hardly do",
    (Source("default", "noisy", 14.0),),
)  # fmt: skip
SLOW = Scene("s", "slow", 20.0, "{victim} is 8 times slower: it gets less, or is ejected")
KILL = Scene("k", "kill", 8.0, "{victim} was killed: what it had not begun to answer is retried")
ADAPTER = Scene(
    "a", "adapter", 15.0, "a new adapter is loaded on all replicas, and asked for",
    (Source("default", "globex", 4.0, (NEW_ADAPTER,)),),
)  # fmt: skip
SCENES = (FLOOD, BURST, NOISY, SLOW, KILL, ADAPTER)


def scenes_of(lone: bool) -> tuple[Scene, ...]:
    """Those that can be played; a `lone` replica is not killed, because no other could take its requests."""
    return tuple(scene for scene in SCENES if not (lone and scene is KILL))


@dataclass(slots=True)
class Stage:
    """Plays scenes, each at most once at a time. The last replica is the victim of those that need one.

    `lone` says that it is the only one. `restart` starts it again, `say` shows a line of news.
    """

    session: aiohttp.ClientSession
    processes: Processes
    victim: str
    victim_url: str
    lone: bool
    restart: Callable[[], Awaitable[None]]
    say: Callable[[str], None]
    sources: set[Source]
    _leads: asyncio.Event = field(default_factory=asyncio.Event)
    _playing: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    @property
    def scenes(self) -> tuple[Scene, ...]:
        """Those that can be played here."""
        return scenes_of(self.lone)

    def pressed(self, key: str) -> None:
        """Play the scene of a key. From then on the person leads; a blank lets the demo lead again."""
        if key == LEAD:
            self._leads.set()
        for scene in self.scenes:
            if scene.key == key.lower():
                self._leads.clear()
                self.begin(scene)

    def begin(self, scene: Scene) -> asyncio.Task[None]:
        """Play a scene; the task of the one that is under way, where it is."""
        task = self._playing.get(scene.name)
        if task is None or task.done():
            task = self._playing[scene.name] = asyncio.create_task(self._play(scene))
        return task

    async def lead(self) -> None:
        """Play one scene after the other while no person leads, for ever."""
        self._leads.set()
        try:
            for scene in cycle(self.scenes):
                self.say("quiet: all requests are served at once")
                await asyncio.sleep(QUIET_S)
                await self._leads.wait()
                # The scene goes on when the person takes the lead meanwhile.
                await asyncio.shield(self.begin(scene))
        finally:
            for task in self._playing.values():
                task.cancel()
            await asyncio.gather(*self._playing.values(), return_exceptions=True)

    async def _play(self, scene: Scene) -> None:
        self.say(scene.news.format(victim=self.victim))
        await self._post(f"{scene.place}/began", {})
        if scene is KILL:
            await self.processes.kill(self.victim)
        elif scene is SLOW:
            await self._post(f"{self.victim_url}/sim/fault", {"kind": "slow", "factor": SLOWER})
        elif scene is ADAPTER:
            await self._post("/v1/load_lora_adapter", {"lora_name": NEW_ADAPTER, "lora_path": "/demo/legal"})
        self.sources.update(scene.sources)
        try:
            await asyncio.sleep(scene.seconds)
        finally:
            self.sources.difference_update(scene.sources)
        if scene is KILL:
            await self.restart()
        elif scene is SLOW:
            await self._post(f"{self.victim_url}/sim/fault", {"kind": None})
        elif scene is ADAPTER:
            await asyncio.sleep(LAST_ONES_S)
            await self._post("/v1/unload_lora_adapter", {"lora_name": NEW_ADAPTER})
        self.say(f"{scene.name}: over")

    async def _post(self, url: str, body: object) -> None:
        try:
            async with self.session.post(url, json=body, headers={"authorization": f"Bearer {ADMIN_KEY}"}) as answer:
                await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            self.say(f"this scene failed: {error}")
