"""The scenes of the demo. A key starts a scene. Until the user presses a key, the demo plays all scenes in turn."""

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
"""Pause between the last request for the new adapter and its unloading, so that no request still waits for it."""
ADMIN_KEY = "demo-admin"
LEAD = " "  # The key that resumes automatic play.


@dataclass(frozen=True, slots=True)
class Scene:
    """A change of traffic or a fault, which lasts some seconds."""

    key: str
    name: str
    seconds: float
    message: str  # Shown at its start. `{victim}` is the name of the affected replica.
    sources: tuple[Source, ...] = ()  # Traffic that the scene adds while it plays.

    @property
    def path(self) -> str:
        """The path of the scene's button. A POST to `PATH/began` logs the start of the scene."""
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
KILL = Scene("k", "kill", 8.0, "{victim} was killed: its requests are retried, its streams continued")
ADAPTER = Scene(
    "a", "adapter", 15.0, "a new adapter is loaded on all replicas, and asked for",
    (Source("default", "globex", 4.0, (NEW_ADAPTER,)),),
)  # fmt: skip
SCENES = (FLOOD, BURST, NOISY, SLOW, KILL, ADAPTER)


def playable_scenes(single_replica: bool) -> tuple[Scene, ...]:
    """Returns the scenes that can be played. A single replica is never killed, because no other could serve."""
    return tuple(scene for scene in SCENES if not (single_replica and scene is KILL))


@dataclass(slots=True)
class Stage:
    """Plays scenes. A running scene is not started again."""

    session: aiohttp.ClientSession
    processes: Processes
    victim: str  # The name of the replica that is killed or slowed down.
    victim_url: str
    single_replica: bool
    restart: Callable[[], Awaitable[None]]  # Starts the killed replica again.
    say: Callable[[str], None]  # Shows a message.
    sources: set[Source]  # The sources of the running traffic, which scenes change.
    _automatic: asyncio.Event = field(default_factory=asyncio.Event)
    _playing: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    @property
    def scenes(self) -> tuple[Scene, ...]:
        """The scenes that can be played here."""
        return playable_scenes(self.single_replica)

    def pressed(self, key: str) -> None:
        """Plays the scene of a key, and stops automatic play. The key LEAD resumes automatic play."""
        if key == LEAD:
            self._automatic.set()
        for scene in self.scenes:
            if scene.key == key.lower():
                self._automatic.clear()
                self.begin(scene)

    def begin(self, scene: Scene) -> asyncio.Task[None]:
        """Plays a scene, unless it is running. Returns its task."""
        task = self._playing.get(scene.name)
        if task is None or task.done():
            task = self._playing[scene.name] = asyncio.create_task(self._play(scene))
        return task

    async def lead(self) -> None:
        """Plays all scenes in turn, except while the user plays scenes, until cancelled."""
        self._automatic.set()
        try:
            for scene in cycle(self.scenes):
                self.say("quiet: all requests are served at once")
                await asyncio.sleep(QUIET_S)
                await self._automatic.wait()
                # The scene continues when the user starts another one meanwhile.
                await asyncio.shield(self.begin(scene))
        finally:
            for task in self._playing.values():
                task.cancel()
            await asyncio.gather(*self._playing.values(), return_exceptions=True)

    async def _play(self, scene: Scene) -> None:
        self.say(scene.message.format(victim=self.victim))
        await self._post(f"{scene.path}/began", {})
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
